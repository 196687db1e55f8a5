//! The serial console: a 16550 at COM1. Its last output is kept for error reports, and copied to a
//! file.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vm_superio::Trigger;
use vm_superio::serial::{Serial, SerialEvents, SerialState};
use vmm_sys_util::eventfd::EventFd;

/// Bytes of output kept for error reports.
const TAIL_LEN: usize = 16 << 10;

/// The most bytes of the copy, so that a guest cannot fill the host's disk.
const COPY_LEN: u64 = 16 << 20;

/// The guest's console output. Clones refer to the same output, and any thread may use them.
#[derive(Clone, Default)]
pub struct Console {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    tail: VecDeque<u8>,
    /// `None` after `limit` bytes.
    copy: Option<File>,
    copied: u64,
    /// The most bytes of the copy.
    limit: u64,
}

impl Console {
    /// A console whose first 16 MiB of output also go to `copy`.
    #[must_use]
    pub fn new(copy: Option<File>) -> Self {
        Self::with_limit(copy, COPY_LEN)
    }

    /// A console all of whose output goes to `copy`, which must be something that a guest can fill:
    /// a terminal, or a pipe that is read.
    #[must_use]
    pub fn unlimited(copy: File) -> Self {
        Self::with_limit(Some(copy), u64::MAX)
    }

    fn with_limit(copy: Option<File>, limit: u64) -> Self {
        Self { inner: Arc::new(Mutex::new(Inner { copy, limit, ..Inner::default() })) }
    }

    /// The last lines of the output, at most `lines`.
    #[must_use]
    pub fn tail(&self, lines: usize) -> String {
        let inner = self.inner.lock();
        let bytes: Vec<u8> = inner.tail.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes).replace('\r', "");
        let all: Vec<&str> = text.trim_end().lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut inner = self.inner.lock();
        inner.tail.extend(bytes);
        let excess = inner.tail.len().saturating_sub(TAIL_LEN);
        inner.tail.drain(..excess);
        inner.copied = inner.copied.saturating_add(bytes.len() as u64);
        let full = inner.copied > inner.limit;
        // A full disk must not stop the guest, so an error ends the copy.
        if inner.copy.as_mut().is_some_and(|copy| full || copy.write_all(bytes).is_err()) {
            inner.copy = None;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The console's interrupt line.
pub(crate) struct SerialIrq(pub(crate) EventFd);

impl Trigger for SerialIrq {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The bytes of a serial port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SerialCounters {
    /// Bytes that the guest read.
    pub reads: u64,
    /// Bytes that it wrote.
    pub writes: u64,
    /// Bytes that it wrote and the console did not take.
    pub lost: u64,
    /// Reads of another size than a byte.
    pub invalid_reads: u64,
    /// Writes of another size than a byte.
    pub invalid_writes: u64,
    /// Accesses that failed, such as by an interrupt that could not be raised.
    pub failures: u64,
}

/// What happens at a serial port. It signals that the guest has read all input, where something
/// waits for that.
pub(crate) struct PortEvents {
    room: Option<EventFd>,
    /// With a lock of its own: a vCPU has the port's while the console's output blocks.
    pub(crate) counters: Arc<Mutex<SerialCounters>>,
}

impl SerialEvents for PortEvents {
    fn buffer_read(&self) {
        self.counters.lock().reads += 1;
    }

    fn out_byte(&self) {
        self.counters.lock().writes += 1;
    }

    fn tx_lost_byte(&self) {
        self.counters.lock().lost += 1;
    }

    fn in_buffer_empty(&self) {
        // The write fails only when the counter is full; the event is pending then.
        let _ = self.room.as_ref().map(|event| event.write(1));
    }
}

/// The device behind the serial ports.
pub(crate) type SerialPort = Serial<SerialIrq, PortEvents, Console>;

/// The registers of the serial port, as a snapshot contains them.
/// Part of the machine state: a change needs a new machine-state version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SerialRegisters {
    pub(crate) baud_divisor_low: u8,
    pub(crate) baud_divisor_high: u8,
    pub(crate) interrupt_enable: u8,
    pub(crate) interrupt_identification: u8,
    pub(crate) line_control: u8,
    pub(crate) line_status: u8,
    pub(crate) modem_control: u8,
    pub(crate) modem_status: u8,
    pub(crate) scratch: u8,
    pub(crate) in_buffer: Vec<u8>,
}

impl From<SerialState> for SerialRegisters {
    fn from(state: SerialState) -> Self {
        Self {
            baud_divisor_low: state.baud_divisor_low,
            baud_divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.in_buffer,
        }
    }
}

/// The serial port's registers are invalid.
#[derive(Debug, Error)]
#[error("the serial port's input queue of {0} bytes exceeds the device's capacity")]
pub struct SerialStateError(usize);

impl Default for SerialRegisters {
    fn default() -> Self {
        SerialState::default().into()
    }
}

impl SerialRegisters {
    /// A serial port with these registers. It signals `room` when the guest has read all input.
    pub(crate) fn into_port(
        self,
        irq: EventFd,
        console: Console,
        room: Option<EventFd>,
    ) -> Result<SerialPort, SerialStateError> {
        let state = SerialState {
            baud_divisor_low: self.baud_divisor_low,
            baud_divisor_high: self.baud_divisor_high,
            interrupt_enable: self.interrupt_enable,
            interrupt_identification: self.interrupt_identification,
            line_control: self.line_control,
            line_status: self.line_status,
            modem_control: self.modem_control,
            modem_status: self.modem_status,
            scratch: self.scratch,
            in_buffer: self.in_buffer,
        };
        let events = PortEvents { room, counters: Arc::default() };
        Serial::from_state(&state, SerialIrq(irq), events, console)
            .map_err(|_| SerialStateError(state.in_buffer.len()))
    }
}

#[cfg(test)]
#[path = "console_tests.rs"]
mod tests;
