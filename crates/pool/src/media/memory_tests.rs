use std::sync::atomic::AtomicBool;

use super::*;

/// Large, so that the kernel finds no gap that is smaller than what the other thread leaves.
const LEN: usize = 8 << 20;

/// ext4 without DAX refuses `MAP_SYNC`.
#[test]
fn a_mapping_that_fails_takes_no_addresses_of_other_threads() {
    let file = tempfile::tempfile().unwrap();
    let len = 16 << 20;
    file.set_len(len).unwrap();
    let how = How { writable: true, synchronous: true, align: 4096 };
    let done = AtomicBool::new(false);
    let other = || {
        let (flags, protection) = (MapFlags::PRIVATE, ProtFlags::READ | ProtFlags::WRITE);
        while !done.load(Ordering::Relaxed) {
            // SAFETY: a new mapping at an address chosen by the kernel touches no other memory.
            let own = unsafe { mmap_anonymous(null_mut(), LEN, protection, flags) }.unwrap();
            std::thread::yield_now();
            // SAFETY: the range is this function's own.
            unsafe { madvise(own, 4096, Advice::LinuxPopulateWrite) }.expect("it is still mapped");
            // SAFETY: the range is this function's own.
            unsafe { munmap(own, LEN) }.unwrap();
        }
    };
    std::thread::scope(|scope| {
        let others = [(); 2].map(|()| scope.spawn(other));
        for _ in 0..20_000 {
            drop(Memory::map(&file, 0, len, how));
        }
        done.store(true, Ordering::Relaxed);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}
