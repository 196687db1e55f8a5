//! The guest's clock.

use core::arch::x86_64::_rdtsc;

/// Ticks of the time-stamp counter.
pub(crate) fn time() -> u64 {
    // SAFETY: the processor has a time-stamp counter, and ring 3 may read it.
    unsafe { _rdtsc() }
}
