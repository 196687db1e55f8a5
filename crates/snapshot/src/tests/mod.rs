//! Tests of whole snapshots.

mod round_trip;
mod support;
