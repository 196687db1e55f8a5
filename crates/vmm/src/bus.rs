//! Dispatch of a guest's port and memory-mapped accesses to devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use thiserror::Error;

use crate::arch::{acpi, layout};
use crate::console::{SerialCounters, SerialPort};
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
    serial_counters: Arc<Mutex<SerialCounters>>,
    keyboard: Option<Mutex<Keyboard>>,
    windows: BTreeMap<u64, Window>,
}

impl Bus {
    /// A guest without a keyboard controller has nothing at its ports.
    pub(crate) fn new(serial: SerialPort, keyboard: Option<Keyboard>) -> Self {
        let serial_counters = serial.events().counters.clone();
        let (serial, keyboard) = (Mutex::new(serial), keyboard.map(Mutex::new));
        Self { serial, serial_counters, keyboard, windows: BTreeMap::new() }
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

    pub(crate) fn serial_counters(&self) -> SerialCounters {
        *self.serial_counters.lock()
    }

    pub(crate) fn keyboard(&self) -> Option<MutexGuard<'_, Keyboard>> {
        self.keyboard.as_ref().map(Mutex::lock)
    }

    /// Handles a read of a port. Without a device it returns all ones, as on a PC.
    pub(crate) fn port_read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        if let Some(offset) = serial_offset(port) {
            match data {
                [byte] => *byte = self.serial().read(offset),
                _ => self.serial_counters.lock().invalid_reads += 1,
            }
            return;
        }
        match (port, self.keyboard()) {
            (layout::SLEEP_STATUS_PORT, _) => data.fill(0),
            (layout::KEYBOARD_DATA_PORT | layout::KEYBOARD_COMMAND_PORT, Some(mut keyboard)) => {
                let [byte] = data else {
                    keyboard.counters.invalid_reads += 1;
                    return;
                };
                keyboard.counters.reads += 1;
                let is_data = port == layout::KEYBOARD_DATA_PORT;
                *byte = if is_data { keyboard.read() } else { keyboard.status() };
            }
            _ => {}
        }
    }

    /// Handles a write to a port.
    pub(crate) fn port_write(&self, port: u16, data: &[u8]) -> Option<PowerRequest> {
        let [byte] = *data else {
            self.count_invalid_write(port);
            return None;
        };
        if let Some(offset) = serial_offset(port) {
            // The only error is an interrupt that cannot be raised; the guest also polls.
            let written = self.serial().write(offset, byte);
            self.serial_counters.lock().failures += u64::from(written.is_err());
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
                let mut keyboard = self.keyboard()?;
                keyboard.counters.writes += 1;
                keyboard.write(byte);
                None
            }
            layout::KEYBOARD_COMMAND_PORT => {
                let mut keyboard = self.keyboard()?;
                keyboard.counters.writes += 1;
                let resets = keyboard.command(byte);
                keyboard.counters.resets += u64::from(resets);
                resets.then_some(PowerRequest::Reset)
            }
            _ => None,
        }
    }

    fn count_invalid_write(&self, port: u16) {
        let is_keyboard =
            [layout::KEYBOARD_DATA_PORT, layout::KEYBOARD_COMMAND_PORT].contains(&port);
        if serial_offset(port).is_some() {
            self.serial_counters.lock().invalid_writes += 1;
        } else if let Some(mut keyboard) = self.keyboard().filter(|_| is_keyboard) {
            keyboard.counters.invalid_writes += 1;
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
