//! Tests of whole snapshots.

mod damage;
mod golden;
mod hostile;
mod replace;
mod round_trip;
pub(crate) mod support;
