//! The firn command.
fn main() {}
