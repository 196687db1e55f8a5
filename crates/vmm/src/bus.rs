//! Dispatch of a guest's port and memory-mapped accesses to devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use thiserror::Error;

use crate::arch::{acpi, layout};
use crate::console::SerialPort;
use crate::i8042::Keyboard;

/// Registers in guest-physical memory. Accesses come from vCPU threads, one at a time per device.
pub trait MmioDevice: Send {
    /// Handles a read at `offset` bytes in the device's window.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Handles a write at `offset` bytes in the device's window.
    fn write(&mut self, offset: u64, data: &[u8]);
}

impl MmioDevice for Box<dyn MmioDevice> {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        (**self).read(offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        (**self).write(offset, data);
    }
}

/// A guest's request to its power control registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PowerRequest {
    /// ACPI S5: power off.
    Off,
    /// The reset register of ACPI, or the keyboard controller: restart. Linux also does so after a
    /// panic.
    Reset,
}

/// The windows of two devices overlap.
#[derive(Debug, Error)]
#[error("a device window at {start:#x} of {len} bytes overlaps another")]
pub struct OverlapError {
    start: u64,
    len: u64,
}

struct Window {
    len: u64,
    device: Arc<Mutex<dyn MmioDevice>>,
}

/// The devices of one microVM, by address. All vCPU threads use it.
pub(crate) struct Bus {
    serial: Mutex<SerialPort>,
    keyboard: Option<Mutex<Keyboard>>,
    windows: BTreeMap<u64, Window>,
}

impl Bus {
    /// A guest without a keyboard controller has nothing at its ports.
    pub(crate) fn new(serial: SerialPort, keyboard: Option<Keyboard>) -> Self {
        let (serial, keyboard) = (Mutex::new(serial), keyboard.map(Mutex::new));
        Self { serial, keyboard, windows: BTreeMap::new() }
    }

    /// Maps `device` at the guest-physical address `start`, for `len` bytes.
    pub(crate) fn add(
        &mut self,
        start: u64,
        len: u64,
        device: Arc<Mutex<dyn MmioDevice>>,
    ) -> Result<(), OverlapError> {
        let overlap = OverlapError { start, len };
        let Some(end) = start.checked_add(len) else { return Err(overlap) };
        let before = self.windows.range(..end).next_back();
        if before.is_some_and(|(at, window)| at + window.len > start) {
            return Err(overlap);
        }
        self.windows.insert(start, Window { len, device });
        Ok(())
    }

    pub(crate) fn serial(&self) -> MutexGuard<'_, SerialPort> {
        self.serial.lock()
    }

    pub(crate) fn keyboard(&self) -> Option<MutexGuard<'_, Keyboard>> {
        self.keyboard.as_ref().map(Mutex::lock)
    }

    /// Handles a read of a port. Without a device it returns all ones, as on a PC.
    pub(crate) fn port_read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        let [byte] = data else {
            if port == layout::SLEEP_STATUS_PORT {
                data.fill(0);
            }
            return;
        };
        if let Some(offset) = serial_offset(port) {
            *byte = self.serial().read(offset);
            return;
        }
        match (port, self.keyboard()) {
            (layout::SLEEP_STATUS_PORT, _) => *byte = 0,
            (layout::KEYBOARD_DATA_PORT, Some(mut keyboard)) => *byte = keyboard.read(),
            (layout::KEYBOARD_COMMAND_PORT, Some(keyboard)) => *byte = keyboard.status(),
            _ => {}
        }
    }

    /// Handles a write to a port.
    pub(crate) fn port_write(&self, port: u16, data: &[u8]) -> Option<PowerRequest> {
        let [byte] = *data else { return None };
        if let Some(offset) = serial_offset(port) {
            // The only error is an interrupt that cannot be raised; the guest also polls.
            let _ = self.serial().write(offset, byte);
            return None;
        }
        let sleep_type = (byte >> 2) & 0b111;
        match port {
            layout::SLEEP_CONTROL_PORT
                if byte & acpi::SLEEP_ENABLE != 0 && sleep_type == acpi::SLEEP_TYPE_S5 =>
            {
                Some(PowerRequest::Off)
            }
            layout::RESET_PORT if byte == acpi::RESET_VALUE => Some(PowerRequest::Reset),
            layout::KEYBOARD_DATA_PORT => {
                self.keyboard()?.write(byte);
                None
            }
            layout::KEYBOARD_COMMAND_PORT => {
                self.keyboard()?.command(byte).then_some(PowerRequest::Reset)
            }
            _ => None,
        }
    }

    /// Handles a read at an address without RAM.
    pub(crate) fn mmio_read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((offset, device)) = self.find(address, data.len()) {
            device.lock().read(offset, data);
        }
    }

    /// Handles a write at an address without RAM.
    pub(crate) fn mmio_write(&self, address: u64, data: &[u8]) {
        if let Some((offset, device)) = self.find(address, data.len()) {
            device.lock().write(offset, data);
        }
    }

    fn find(&self, address: u64, len: usize) -> Option<(u64, &Mutex<dyn MmioDevice>)> {
        let (start, window) = self.windows.range(..=address).next_back()?;
        let offset = address - start;
        let end = offset.checked_add(len as u64)?;
        (end <= window.len).then_some((offset, &*window.device))
    }
}

fn serial_offset(port: u16) -> Option<u8> {
    let offset = port.checked_sub(layout::SERIAL_PORT)?;
    if offset < layout::SERIAL_PORTS { u8::try_from(offset).ok() } else { None }
}

#[cfg(test)]
#[path = "bus_tests.rs"]
mod tests;
