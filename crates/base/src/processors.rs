use rustix::thread::sched_getaffinity;

/// The number of threads that this process can run at once, by its affinity; 1 if it is not known.
/// The limits of its control group are in files, which a jailed process cannot read.
#[must_use]
pub fn processors() -> usize {
    sched_getaffinity(None).map_or(1, |set| set.count() as usize)
}
