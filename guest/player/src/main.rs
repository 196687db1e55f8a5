//! The player as a freestanding program. `crates/bench/build.rs` builds it.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

/// The first instruction; the monitor has set the stack.
///
/// # Safety
/// See [`firn_player::run`]. Only a monitor jumps here.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".start")]
unsafe extern "C" fn _start(digest: u64, len: u64, input: u64, modes: u64) -> ! {
    // SAFETY: the monitor guarantees what `run` requires.
    unsafe { firn_player::run(digest, len, input, modes) }
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    firn_player::end()
}

/// The compiled core library refers to this symbol. Nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
