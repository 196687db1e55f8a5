//! A confined thread makes no system call that is denied when it allocates memory. The process is
//! the test's own, because the thread of another test has a heap before it can share one.

use std::sync::Barrier;

use firn_run::StartError;
use firn_run::jail::{self, ThreadRole};

/// More than the heaps that the C library makes before it counts the processors.
const THREADS: usize = 40;
const BLOCKS: usize = 1024;
const BYTES: usize = 1024;

fn main() -> Result<(), StartError> {
    jail::share_heap()?;
    let confined = std::thread::spawn(|| {
        jail::prepare();
        jail::confine_thread(ThreadRole::Serve, 148)?;
        allocate();
        Ok(())
    });
    confined.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn allocate() {
    let together = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let blocks: Vec<_> = (0..BLOCKS).map(|block| vec![block; BYTES]).collect();
                together.wait();
                drop(blocks);
            });
        }
    });
}
