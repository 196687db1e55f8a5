//! What every other crate of firn uses: the page size, sizes, durations, error chains, number casts
//! and handlers of signals.
//!
//! ```
//! use firn_base::{PAGE_SIZE, format_bytes, parse_size};
//!
//! let size = parse_size("256M")?;
//! assert_eq!(size / PAGE_SIZE, 65_536);
//! assert_eq!(format_bytes(size), "256.0 MiB");
//! # Ok::<(), firn_base::ParseSizeError>(())
//! ```

mod error_chain;
pub mod fs_verity;
pub mod num;
mod once;
mod processors;
mod programs;
mod range;
mod range_set;
mod signals;
mod size;
mod stack;
mod time;
mod writeback;

pub use error_chain::{EmptyErrorChain, ErrorChain, error_chain};
pub use once::get_or_try_init;
pub use processors::{move_away, processors};
pub use programs::monitor_program;
pub use range::{GuestRange, ImageRange, PageRange};
pub use range_set::RangeSet;
pub use signals::{SignalHandler, end_with, handle_signal, ignore_broken_pipes};
pub use size::{PAGE_SIZE, ParseSizeError, format_bytes, parse_size};
pub use stack::touch_stack;
pub use time::{cpu_ns, format_milliseconds, nanoseconds, now_ns, ns_since};
pub use writeback::begin_writeback;
