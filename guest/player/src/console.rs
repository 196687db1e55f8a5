//! The serial port COM1, polled, in ring 3 with I/O privilege level 3.

use core::arch::asm;

const DATA: u16 = 0x3f8;
const LINE_STATUS: u16 = DATA + 5;
const DATA_READY: u8 = 1;
const TRANSMITTER_EMPTY: u8 = 1 << 5;

fn read(port: u16) -> u8 {
    let value;
    // SAFETY: accesses to these ports do not affect memory.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) };
    value
}

fn write(port: u16, value: u8) {
    // SAFETY: accesses to these ports do not affect memory.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack)) };
}

/// Waits for a byte.
pub(crate) fn wait() {
    while read(LINE_STATUS) & DATA_READY == 0 {}
    read(DATA);
}

/// Writes a line: a word, and numbers in decimal.
pub(crate) fn line(text: &[u8], numbers: &[u64]) {
    text.iter().copied().for_each(put);
    for number in numbers {
        put(b' ');
        decimal(*number);
    }
    put(b'\n');
}

fn decimal(number: u64) {
    let mut unit = 1;
    while number / unit >= 10 {
        unit *= 10;
    }
    while unit > 0 {
        // A digit always fits.
        put(b'0' + u8::try_from(number / unit % 10).unwrap_or_default());
        unit /= 10;
    }
}

fn put(byte: u8) {
    while read(LINE_STATUS) & TRANSMITTER_EMPTY == 0 {}
    write(DATA, byte);
}
