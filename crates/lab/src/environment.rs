//! The variables that a command in the lab finds in its environment.

/// Set to `1` in the lab.
pub(crate) const LAB: &str = "FIRN_LAB";
/// Set to [`INSTRUCTIONS`] in a lab whose clock counts instructions.
pub(crate) const CLOCK: &str = "FIRN_LAB_CLOCK";
/// The value of [`CLOCK`].
pub(crate) const INSTRUCTIONS: &str = "instructions";

/// Whether this process runs in the lab.
#[must_use]
pub fn is_here() -> bool {
    std::env::var_os(LAB).is_some()
}

/// Whether this process runs in a lab whose clock counts instructions, 1 ns each.
#[must_use]
pub fn counts_instructions() -> bool {
    std::env::var_os(CLOCK).is_some_and(|clock| clock == INSTRUCTIONS)
}
