//! Cells that are filled by what can fail.

use std::sync::OnceLock;

/// The value of a cell, which `make` makes if there is none. Threads at once may each make one; the
/// first is kept.
///
/// # Errors
/// That of `make`; the cell stays empty.
pub fn get_or_try_init<T, E>(
    cell: &OnceLock<T>,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<&T, E> {
    if let Some(value) = cell.get() {
        return Ok(value);
    }
    let made = make()?;
    Ok(cell.get_or_init(|| made))
}

#[cfg(test)]
#[path = "once_tests.rs"]
mod tests;
