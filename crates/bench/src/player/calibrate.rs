//! The speed of the player's gap loop on this host.

use std::arch::asm;
use std::time::Instant;

/// Iterations of a sample: some milliseconds, so that reading the clock does not count.
const ITERATIONS: u32 = 10_000_000;
/// Samples. The fastest one had no interruption.
const SAMPLES: u32 = 5;

/// Iterations of the player's gap loop in a nanosecond. A guest in ring 3 runs the loop at the
/// speed at which this process runs it.
pub(crate) fn turns_per_ns() -> f64 {
    let sample = |_| {
        let begun = Instant::now();
        // SAFETY: the loop changes one register and the flags.
        unsafe {
            // Aligned as the player's.
            asm!(
                ".p2align 5",
                "2: dec {0:e}",
                "jnz 2b",
                inout(reg) ITERATIONS => _,
                options(nomem, nostack)
            );
        }
        f64::from(ITERATIONS) / begun.elapsed().as_nanos().max(1) as f64
    };
    (0..SAMPLES).map(sample).fold(0.0, f64::max)
}
