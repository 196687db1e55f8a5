//! The keyboard controller of a PC (i8042), with a keyboard that only ever presses Ctrl-Alt-Del.
//!
//! Linux resets the machine through it (`reboot=k`), and a caller can ask the guest to restart
//! itself by the keys. It has no mouse and translates no scan codes.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

/// Bytes that wait for the guest at most. Further answers are lost, as on a PC.
const CAPACITY: usize = 16;

/// Status: a byte waits for the guest; the self-test has passed; the keyboard is not locked.
const OUTPUT_FULL: u8 = 1;
const SYSTEM: u8 = 1 << 2;
const UNLOCKED: u8 = 1 << 4;

/// Control byte: interrupts are enabled; the keyboard is disabled; scan codes are translated.
const INTERRUPT: u8 = 1;
const DISABLED: u8 = 1 << 4;
const TRANSLATES: u8 = 1 << 6;

/// Commands of the controller.
const READ_CONTROL: u8 = 0x20;
const WRITE_CONTROL: u8 = 0x60;
const TEST_MOUSE: u8 = 0xa9;
const TEST_CONTROLLER: u8 = 0xaa;
const TEST_KEYBOARD: u8 = 0xab;
const DISABLE: u8 = 0xad;
const ENABLE: u8 = 0xae;
const READ_OUTPUTS: u8 = 0xd0;
const WRITE_OUTPUTS: u8 = 0xd1;
const WRITE_KEYBOARD_BUFFER: u8 = 0xd2;
const LOOP_MOUSE: u8 = 0xd3;
const WRITE_MOUSE: u8 = 0xd4;
const RESET: u8 = 0xfe;

/// Answers of the controller.
const CONTROLLER_PASSED: u8 = 0x55;
const KEYBOARD_PASSED: u8 = 0;
/// The clock line is stuck: there is no mouse.
const NO_MOUSE: u8 = 1;

/// Commands and answers of the keyboard.
const IDENTIFY: u8 = 0xf2;
const RESET_KEYBOARD: u8 = 0xff;
const ACKNOWLEDGED: u8 = 0xfa;
const IDENTITY: [u8; 2] = [0xab, 0x83];
const SELF_TEST_PASSED: u8 = 0xaa;

/// Control, Alt and Delete pressed and released, in scan code set 2.
const CTRL_ALT_DEL: [u8; 11] = [0x14, 0x11, 0xe0, 0x71, 0xe0, 0xf0, 0x71, 0xf0, 0x11, 0xf0, 0x14];

/// The registers. Part of the machine state: a change needs a new machine-state version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeyboardState {
    pub(crate) control: u8,
    pub(crate) outputs: u8,
    /// The controller's command whose parameter comes next.
    pub(crate) command: Option<u8>,
    /// Bytes for the guest, the oldest first.
    pub(crate) buffer: Vec<u8>,
}

impl Default for KeyboardState {
    /// As after power-on: interrupts and the keyboard are enabled.
    fn default() -> Self {
        Self { control: INTERRUPT | SYSTEM, outputs: 0, command: None, buffer: Vec::new() }
    }
}

/// A saved state has more bytes for the guest than the controller holds.
#[derive(Debug, Error)]
#[error("the keyboard controller's buffer of {0} bytes exceeds the device's capacity")]
pub struct KeyboardStateError(usize);

/// Why Ctrl-Alt-Del was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CtrlAltDelError {
    /// The guest has no keyboard controller.
    #[error("the guest has no keyboard controller: it was started without the devices of a PC")]
    NoKeyboard,
    /// The guest does not read its keyboard.
    #[error("the guest does not read its keyboard: it may have no driver for it (i8042, atkbd)")]
    Full,
}

/// The accesses of a guest to a keyboard controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyboardCounters {
    /// Reads of a byte.
    pub reads: u64,
    /// Writes of a byte.
    pub writes: u64,
    /// Reads of another size.
    pub invalid_reads: u64,
    /// Writes of another size.
    pub invalid_writes: u64,
    /// Writes that reset the machine.
    pub resets: u64,
}

/// The controller.
#[derive(Debug)]
pub(crate) struct Keyboard {
    state: KeyboardState,
    irq: EventFd,
    /// Counted by the bus.
    pub(crate) counters: KeyboardCounters,
}

impl Keyboard {
    /// A controller with these registers. If bytes wait for the guest, it is interrupted.
    pub(crate) fn new(state: KeyboardState, irq: EventFd) -> Result<Self, KeyboardStateError> {
        if state.buffer.len() > CAPACITY {
            return Err(KeyboardStateError(state.buffer.len()));
        }
        let keyboard = Self { state, irq, counters: KeyboardCounters::default() };
        keyboard.interrupt();
        Ok(keyboard)
    }

    pub(crate) fn state(&self) -> KeyboardState {
        self.state.clone()
    }

    /// Presses and releases the keys.
    ///
    /// # Errors
    /// [`CtrlAltDelError::Full`]; the guest then gets nothing.
    pub(crate) fn press_ctrl_alt_del(&mut self) -> Result<(), CtrlAltDelError> {
        if self.state.buffer.len() + CTRL_ALT_DEL.len() > CAPACITY {
            return Err(CtrlAltDelError::Full);
        }
        self.answer(&CTRL_ALT_DEL);
        Ok(())
    }

    /// Reads the status port.
    pub(crate) fn status(&self) -> u8 {
        let full = if self.state.buffer.is_empty() { 0 } else { OUTPUT_FULL };
        full | SYSTEM | UNLOCKED
    }

    /// Reads the data port: the next byte, or 0 if there is none.
    pub(crate) fn read(&mut self) -> u8 {
        if self.state.buffer.is_empty() {
            return 0;
        }
        let byte = self.state.buffer.remove(0);
        self.interrupt();
        byte
    }

    /// Writes a command to the command port. Returns whether it resets the machine.
    pub(crate) fn command(&mut self, command: u8) -> bool {
        self.state.command = None;
        match command {
            READ_CONTROL => self.answer(&[self.state.control]),
            READ_OUTPUTS => self.answer(&[self.state.outputs]),
            TEST_CONTROLLER => self.answer(&[CONTROLLER_PASSED]),
            TEST_KEYBOARD => self.answer(&[KEYBOARD_PASSED]),
            TEST_MOUSE => self.answer(&[NO_MOUSE]),
            DISABLE => self.state.control |= DISABLED,
            ENABLE => self.state.control &= !DISABLED,
            WRITE_CONTROL | WRITE_OUTPUTS | WRITE_KEYBOARD_BUFFER | LOOP_MOUSE | WRITE_MOUSE => {
                self.state.command = Some(command);
            }
            RESET => return true,
            // Of the mouse, or unknown.
            _ => {}
        }
        false
    }

    /// Writes the data port: a parameter of the controller's command, or a byte for the keyboard.
    pub(crate) fn write(&mut self, byte: u8) {
        match self.state.command.take() {
            Some(WRITE_CONTROL) => self.state.control = byte & !TRANSLATES,
            Some(WRITE_OUTPUTS) => self.state.outputs = byte,
            Some(WRITE_KEYBOARD_BUFFER) => self.answer(&[byte]),
            // There is no mouse.
            Some(_) => {}
            None => match byte {
                IDENTIFY => self.answer(&[ACKNOWLEDGED, IDENTITY[0], IDENTITY[1]]),
                RESET_KEYBOARD => self.answer(&[ACKNOWLEDGED, SELF_TEST_PASSED]),
                // Lights, rates and their parameters.
                _ => self.answer(&[ACKNOWLEDGED]),
            },
        }
    }

    fn answer(&mut self, bytes: &[u8]) {
        let room = CAPACITY.saturating_sub(self.state.buffer.len());
        self.state.buffer.extend(bytes.iter().take(room));
        self.interrupt();
    }

    /// Interrupts the guest if a byte waits for it.
    fn interrupt(&self) {
        if self.state.control & INTERRUPT != 0 && !self.state.buffer.is_empty() {
            // The write fails only when the counter is full; an interrupt is pending then.
            let _ = self.irq.write(1);
        }
    }
}

#[cfg(test)]
#[path = "i8042_tests.rs"]
mod tests;
