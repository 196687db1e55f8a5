use std::hint::black_box;

/// Touches the next `BYTES` of this thread's stack, which what runs later then finds mapped. They
/// must be free.
#[inline(never)]
pub fn touch_stack<const BYTES: usize>() {
    // A reference to a constant would be one to the program's own data.
    let mut bytes = [1_u8; BYTES];
    black_box(&mut bytes);
}

#[cfg(test)]
#[path = "stack_tests.rs"]
mod tests;
