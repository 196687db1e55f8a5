//! The boot code that other monitors enter before the player. `crates/bench/build.rs` builds it.
#![no_std]
#![no_main]

use core::arch::global_asm;
use core::panic::PanicInfo;

global_asm!(include_str!("boot.S"), options(att_syntax));

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    loop {}
}
