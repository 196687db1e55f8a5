//! Several microVMs at once.

/// The results of `N` threads that run `one` at the same time.
pub fn at_once<const N: usize, T: Send>(one: impl Fn() -> T + Sync) -> [T; N] {
    std::thread::scope(|scope| {
        let threads: [_; N] = std::array::from_fn(|_| scope.spawn(&one));
        threads.map(|thread| thread.join().unwrap())
    })
}
