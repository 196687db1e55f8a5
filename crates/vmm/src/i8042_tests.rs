use proptest::prelude::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;

fn keyboard(state: KeyboardState) -> (Keyboard, EventFd) {
    let irq = EventFd::new(EFD_NONBLOCK).unwrap();
    (Keyboard::new(state, irq.try_clone().unwrap()).unwrap(), irq)
}

/// What the guest reads while the status has a byte.
fn read_all(keyboard: &mut Keyboard) -> Vec<u8> {
    let mut bytes = Vec::new();
    while keyboard.status() & OUTPUT_FULL != 0 {
        bytes.push(keyboard.read());
    }
    bytes
}

fn ask(keyboard: &mut Keyboard, command: u8) -> Vec<u8> {
    assert!(!keyboard.command(command));
    read_all(keyboard)
}

/// The steps of Linux' `i8042` and `atkbd`.
#[test]
fn a_driver_finds_a_keyboard_and_no_mouse() {
    let (mut keyboard, _irq) = keyboard(KeyboardState::default());
    assert_eq!(ask(&mut keyboard, TEST_CONTROLLER), [CONTROLLER_PASSED]);
    let control = ask(&mut keyboard, READ_CONTROL)[0];
    assert_eq!(control & (INTERRUPT | TRANSLATES), INTERRUPT);
    assert!(!keyboard.command(WRITE_CONTROL));
    keyboard.write((control | DISABLED | TRANSLATES) & !INTERRUPT);
    let changed = ask(&mut keyboard, READ_CONTROL)[0];
    assert_eq!(changed & (INTERRUPT | DISABLED | TRANSLATES), DISABLED);
    assert!(!keyboard.command(LOOP_MOUSE));
    keyboard.write(0x5a);
    assert!(read_all(&mut keyboard).is_empty());
    assert_eq!(ask(&mut keyboard, TEST_MOUSE), [NO_MOUSE]);
    assert_eq!(ask(&mut keyboard, TEST_KEYBOARD), [KEYBOARD_PASSED]);
    assert!(ask(&mut keyboard, ENABLE).is_empty());
    keyboard.write(IDENTIFY);
    assert_eq!(read_all(&mut keyboard), [ACKNOWLEDGED, 0xab, 0x83]);
    // Lights.
    keyboard.write(0xed);
    keyboard.write(0x02);
    assert_eq!(read_all(&mut keyboard), [ACKNOWLEDGED; 2]);
    keyboard.write(RESET_KEYBOARD);
    assert_eq!(read_all(&mut keyboard), [ACKNOWLEDGED, SELF_TEST_PASSED]);
}

#[test]
fn only_the_reset_command_resets() {
    let (mut keyboard, _irq) = keyboard(KeyboardState::default());
    for command in 0..=u8::MAX {
        assert_eq!(keyboard.command(command), command == RESET, "{command:#x}");
    }
}

#[test]
fn the_keys_arrive_with_an_interrupt_for_each_byte() {
    let (mut keyboard, irq) = keyboard(KeyboardState::default());
    keyboard.press_ctrl_alt_del().unwrap();
    // A guest that has not read them gets no more.
    assert_eq!(keyboard.press_ctrl_alt_del(), Err(CtrlAltDelError::Full));
    let mut bytes = Vec::new();
    while irq.read().is_ok() {
        bytes.push(keyboard.read());
    }
    assert_eq!(bytes, CTRL_ALT_DEL);
    // Interrupts that the guest has disabled.
    keyboard.command(WRITE_CONTROL);
    keyboard.write(0);
    keyboard.press_ctrl_alt_del().unwrap();
    assert!(irq.read().is_err());
    assert_eq!(read_all(&mut keyboard), CTRL_ALT_DEL);
}

#[test]
fn a_restored_controller_interrupts_for_what_waits() {
    let (mut before, _irq) = keyboard(KeyboardState::default());
    before.press_ctrl_alt_del().unwrap();
    before.read();
    let (mut after, irq) = keyboard(before.state());
    assert_eq!(irq.read().unwrap(), 1);
    assert_eq!(read_all(&mut after), CTRL_ALT_DEL[1..]);
    let state = KeyboardState { buffer: vec![0; CAPACITY + 1], ..KeyboardState::default() };
    let error = Keyboard::new(state, EventFd::new(0).unwrap()).unwrap_err();
    assert!(error.to_string().contains("17 bytes"), "{error}");
}

proptest! {
    #[test]
    fn nothing_that_a_guest_writes_makes_it_grow(writes: Vec<(bool, u8)>) {
        let (mut keyboard, _irq) = keyboard(KeyboardState::default());
        for (command, byte) in writes {
            if command { keyboard.command(byte); } else { keyboard.write(byte) }
            prop_assert!(keyboard.state().buffer.len() <= CAPACITY);
            let _ = keyboard.press_ctrl_alt_del();
        }
        prop_assert!(read_all(&mut keyboard).len() <= CAPACITY);
    }
}
