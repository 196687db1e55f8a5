//! Restore plans: the planners that make them and the executor that carries them out.
//!
//! A restore answers one question: where does each page of guest memory come from, when, and which
//! VMs share it? The answer is a [`Plan`]: segments that tile guest memory exactly once, the layers
//! (mmaps) that realise them, and a schedule of other work. A [`Planner`](planners::Planner) makes
//! it from a snapshot and facts about the host. [`execute`] checks and executes it, and returns the
//! [`GuestMemory`] that a microVM runs on. Each restore system of the papers is one planner.
//!
//! This crate does not need KVM: a plan can be executed in any process, and
//! [compared](compare::compare) page by page with the image.
//!
//! ```
//! use firn_memory::planners::{ImageFacts, PlanInput, parse};
//! use firn_memory::{HostFacts, Sources, compare::compare, execute};
//! use firn_snapshot::{MemoryLayout, PageSet};
//!
//! let image = tempfile::tempfile()?;
//! let layout = MemoryLayout::for_size(64 << 20)?;
//! image.set_len(layout.total_bytes())?;
//! let zero_map = PageSet::new(layout.pages());
//!
//! let planner = parse("firecracker:readahead=off")?;
//! let host = HostFacts::read()?;
//! let facts = ImageFacts::of(&image)?;
//! let plan = planner.plan(&PlanInput {
//!     layout: &layout,
//!     image: facts,
//!     zero_map: &zero_map,
//!     profile: None,
//!     snapshot: None,
//!     copies: None,
//!     host: &host,
//! })?;
//! let executed = execute(&plan, &Sources::image(&image))?;
//! assert!(compare(&executed.memory, &image, &zero_map)?.is_equal());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bpf;
pub mod compare;
pub mod copy_ahead;
mod executor;
mod guest_memory;
mod host_facts;
pub mod loader;
mod map;
mod own_files;
pub mod page_cache;
pub mod pager;
mod plan;
pub mod planners;
mod process;
pub mod recorders;
pub mod sigbus;
mod slot;
#[cfg(test)]
mod testing;
pub mod trace;
pub mod uffd;
mod verify;

pub use bpf::{BpfCost, BpfCosts, BpfError, Prefetch, ReadDelay};
pub use executor::{
    AfterResume, ExecuteError, ExecuteReport, Executed, ImageSource, Sources, StepError,
    StepReport, execute, execute_in,
};
pub use guest_memory::{
    AnonymousError, ChunkCopies, CopyChunkError, DiscardError, GuestMemory, GuestPages, GuestView,
    MemoryUsage, Reservation, UsageError, ViewError,
};
pub use host_facts::{HostFacts, HostFactsError};
pub use own_files::{OwnDevices, OwnFiles, OwnFilesError, USERFAULTFD_DEVICE};
pub use plan::{
    Advice, Integrity, Layer, Leaf, LoadFile, Plan, PlanError, PlanSummary, PlanTable, Segment,
    Sharing, Source, Step, When, Work,
};
pub use process::{ProcessCounters, ProcessCountersError, map_program, prefer_as_victim};
pub use slot::Slot;
pub use verify::{VerifyPlanError, verify_plan};
