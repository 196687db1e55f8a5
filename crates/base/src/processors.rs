use std::os::unix::thread::JoinHandleExt;
use std::thread::JoinHandle;

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu};

/// The number of threads that this process can run at once, by its affinity; 1 if it is not known.
/// The limits of its control group are in files, which a jailed process cannot read.
#[must_use]
pub fn processors() -> usize {
    sched_getaffinity(None).map_or(1, |set| set.count() as usize)
}

/// Moves a thread that has just been created to another processor than the one of its creator, if
/// there is one. Linux often starts it on the same, even while others are idle: then it runs only
/// once its creator waits. It may come back as soon as this returns. Fails without a consequence.
pub fn move_away<T>(thread: &JoinHandle<T>) {
    let Ok(all) = sched_getaffinity(None) else { return };
    let mut others = all;
    others.unset(sched_getcpu());
    if others.count() > 0 {
        set_affinity(thread, &others);
        set_affinity(thread, &all);
    }
}

fn set_affinity<T>(thread: &JoinHandle<T>, set: &CpuSet) {
    // SAFETY: the thread was not joined, so its handle is valid, and the kernel only reads the set.
    unsafe {
        libc::pthread_setaffinity_np(
            thread.as_pthread_t(),
            size_of_val(set),
            std::ptr::from_ref(set).cast(),
        )
    };
}
