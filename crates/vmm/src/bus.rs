//! Where a guest's port and memory-mapped accesses go.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

use crate::arch::{acpi, layout};
use crate::console::SerialPort;

/// Registers in guest-physical memory. Accesses come from vCPU threads, one at a time per device.
pub trait MmioDevice: Send {
    /// Answers a read at `offset` bytes into the device's window.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Takes a write at `offset` bytes into the device's window.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// What a guest asks of its power supply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PowerRequest {
    /// ACPI S5: the guest shut down.
    Off,
    /// The ACPI reset register: the guest restarts, which Linux also does after a panic.
    Reset,
}

/// Two devices want the same addresses.
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

/// The devices of one microVM, by address. Any vCPU thread may use it.
pub(crate) struct Bus {
    serial: Mutex<SerialPort>,
    windows: BTreeMap<u64, Window>,
}

impl Bus {
    pub(crate) fn new(serial: SerialPort) -> Self {
        Self { serial: Mutex::new(serial), windows: BTreeMap::new() }
    }

    /// Gives `device` the guest-physical addresses from `start`, `len` bytes.
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
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A guest reads a port. What is not there reads as all ones, as on a PC.
    pub(crate) fn port_read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        if let (Some(offset), [byte]) = (serial_offset(port), &mut *data) {
            *byte = self.serial().read(offset);
        } else if port == layout::SLEEP_STATUS_PORT {
            data.fill(0);
        }
    }

    /// A guest writes a port.
    pub(crate) fn port_write(&self, port: u16, data: &[u8]) -> Option<PowerRequest> {
        let [byte] = *data else { return None };
        if let Some(offset) = serial_offset(port) {
            // The only error is an interrupt that could not be signalled; the guest polls too.
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
            _ => None,
        }
    }

    /// A guest reads memory without RAM behind it.
    pub(crate) fn mmio_read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((offset, device)) = self.find(address, data.len()) {
            device.lock().unwrap_or_else(PoisonError::into_inner).read(offset, data);
        }
    }

    /// A guest writes memory without RAM behind it.
    pub(crate) fn mmio_write(&self, address: u64, data: &[u8]) {
        if let Some((offset, device)) = self.find(address, data.len()) {
            device.lock().unwrap_or_else(PoisonError::into_inner).write(offset, data);
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
