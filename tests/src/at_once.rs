//! Several microVMs at once.

/// What `N` threads come to that do the same at once.
pub fn at_once<const N: usize, T: Send>(one: impl Fn() -> T + Sync) -> [T; N] {
    std::thread::scope(|scope| {
        let threads: [_; N] = std::array::from_fn(|_| scope.spawn(&one));
        threads.map(|thread| thread.join().unwrap())
    })
}
