//! Writing stored bytes back from the processor's caches (Intel SDM 1, 11.4.6; kernel:
//! `arch/x86/lib/usercopy_64.c`).

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _mm_sfence};

use serde::{Deserialize, Serialize};

use crate::layout::LINE;

/// An instruction that writes a cache line back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlushInstruction {
    /// Writes the line back and may keep it cached.
    Clwb,
    /// Writes the line back and evicts it; only a fence orders it.
    Clflushopt,
    /// Writes the line back and evicts it; executes after earlier CLFLUSH instructions.
    Clflush,
}

impl FlushInstruction {
    /// The best instruction that this processor supports. Every x86-64 processor supports CLFLUSH.
    #[must_use]
    pub fn detect() -> Self {
        const CLFLUSHOPT: u32 = 1 << 23;
        const CLWB: u32 = 1 << 24;
        let extended = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).ebx } else { 0 };
        if extended & CLWB != 0 {
            Self::Clwb
        } else if extended & CLFLUSHOPT != 0 {
            Self::Clflushopt
        } else {
            Self::Clflush
        }
    }

    /// Starts writing back every cache line that overlaps the range. [`fence`] waits for
    /// completion.
    ///
    /// # Safety
    /// The range must be mapped.
    pub(crate) unsafe fn flush(self, start: *const u8, len: usize) {
        const STEP: usize = firn_base::num::usize_of(LINE);
        let end = start.addr() + len;
        let mut line = start.wrapping_sub(start.addr() % STEP);
        while line.addr() < end {
            match self {
                // SAFETY: the caller guarantees that the range is mapped, and mappings consist of
                // whole pages, so the line is mapped; writing it back changes no memory.
                Self::Clwb => unsafe {
                    asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags));
                },
                // SAFETY: as above.
                Self::Clflushopt => unsafe {
                    asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
                },
                // SAFETY: as above.
                Self::Clflush => unsafe {
                    asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags));
                },
            }
            line = line.wrapping_add(STEP);
        }
    }
}

/// Waits for all earlier stores and flushes (SFENCE).
pub(crate) fn fence() {
    // SAFETY: every x86-64 processor has SSE, and a fence changes no memory.
    unsafe { _mm_sfence() };
}
