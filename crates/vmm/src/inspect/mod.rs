//! Instruments that observe a guest without changing it: which of its accesses faults, how long it
//! computes, which of its pages are free.

mod fault_attribution;
mod free_pages;
mod guest_time;
mod perf_ring;

pub use fault_attribution::{
    AttributionControl, AttributionError, FaultAttribution, fault_attribution,
};
pub use free_pages::{FreePagesError, free_pages};
pub use guest_time::{GuestTimeError, GuestTimeTotals, TracepointFormat, Tracepoints};
