//! Experiments of the papers: what is measured, how, and what is made of the numbers.
//!
//! The measuring instrument is the [`player`], a freestanding guest that repeats the page accesses of a recorded
//! [`Trace`](firn_memory::trace::Trace) at native speed on any KVM. [`traces`] finds a trace by its name.

pub mod player;
pub mod traces;
