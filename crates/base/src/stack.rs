use std::hint::black_box;

/// Touches the next `BYTES` of this thread's stack, which what runs later then finds mapped. They
/// must be free.
#[inline(never)]
pub fn touch_stack<const BYTES: usize>() {
    black_box(&[1_u8; BYTES]);
}
