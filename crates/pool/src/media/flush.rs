//! Getting stored bytes out of the processor's caches (Intel SDM 1, 11.4.6; kernel: `arch/x86/lib/usercopy_64.c`).

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _mm_sfence};

use serde::{Deserialize, Serialize};

use crate::layout::LINE;

/// The instruction that writes a cache line back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlushInstruction {
    /// Writes the line back and may keep it cached.
    Clwb,
    /// Writes the line back and drops it; ordered by a fence only.
    Clflushopt,
    /// Writes the line back and drops it; each waits for the one before.
    Clflush,
}

impl FlushInstruction {
    /// The best one that this processor has. Every x86-64 processor has CLFLUSH.
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

    /// Writes back every cache line that holds a byte of the range. [`fence`] waits for them.
    ///
    /// # Safety
    /// The range is mapped.
    pub(crate) unsafe fn flush(self, start: *const u8, len: usize) {
        const STEP: usize = firn_base::num::usize_of(LINE);
        let end = start.addr() + len;
        let mut line = start.wrapping_sub(start.addr() % STEP);
        while line.addr() < end {
            match self {
                // SAFETY: the line is mapped, by the caller's word and because a mapping has whole pages;
                // writing it back changes no memory.
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

/// Waits for the stores and flushes before it (SFENCE).
pub(crate) fn fence() {
    // SAFETY: every x86-64 processor has SSE, and a fence changes no memory.
    unsafe { _mm_sfence() };
}
