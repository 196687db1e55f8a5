use std::io::Write;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{COPY_LEN, Console, SerialRegisters, TAIL_LEN};

#[test]
fn endless_output_is_kept_and_copied_up_to_a_limit() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut console = Console::new(Some(file.reopen().unwrap()));
    let piece = vec![b'x'; 1 << 20];
    for _ in 0..COPY_LEN / (1 << 20) + 3 {
        console.write_all(&piece).unwrap();
    }
    assert_eq!(file.as_file().metadata().unwrap().len(), COPY_LEN);
    console.write_all(b"\r\nlast line\r\n").unwrap();
    assert_eq!(console.tail(1), "last line");
    assert!(console.tail(usize::MAX).len() <= TAIL_LEN);
}

#[test]
fn an_unlimited_console_copies_everything() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut console = Console::unlimited(file.reopen().unwrap());
    let piece = vec![b'x'; 1 << 20];
    let pieces = COPY_LEN / (1 << 20) + 3;
    (0..pieces).for_each(|_| console.write_all(&piece).unwrap());
    assert_eq!(file.as_file().metadata().unwrap().len(), pieces << 20);
}

/// A snapshot does not contain an interrupt in flight, so a port with a pending one raises it
/// again.
#[test]
fn a_restored_port_raises_its_pending_interrupt_again() {
    let transmitter_empty = SerialRegisters {
        interrupt_enable: 0b10,
        interrupt_identification: 0b10,
        ..SerialRegisters::default()
    };
    for (registers, expected) in [(transmitter_empty, true), (SerialRegisters::default(), false)] {
        let irq = EventFd::new(EFD_NONBLOCK).unwrap();
        let _port =
            registers.into_port(irq.try_clone().unwrap(), Console::default(), None).unwrap();
        assert_eq!(irq.read().is_ok(), expected);
    }
}
