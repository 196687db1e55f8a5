use std::num::NonZero;
use std::sync::OnceLock;
use std::thread::available_parallelism;

/// The number of threads that this process can run at once; 1 if it is not known. It is found once
/// in a process, because a jailed one cannot read the limits of its control group.
#[must_use]
pub fn processors() -> usize {
    static FOUND: OnceLock<usize> = OnceLock::new();
    *FOUND.get_or_init(|| available_parallelism().map_or(1, NonZero::get))
}
