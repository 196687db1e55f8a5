//! A monitor in a process of its own, and the messages between it and the process that started it.
//!
//! The two ends of a `SOCK_SEQPACKET` socket exchange orders and events, as JSON; descriptors go
//! with an order. The monitor's end is its standard input, so the monitor ends when the process
//! that started it does. A monitor that has no order waits as a standby monitor: it has KVM open,
//! and, once it knows a [`Shape`], the VM and its vCPUs made.
//!
//! ```text
//! owner                                 monitor
//!   ── StandBy(Shape) ──────────────────▶   any number of them
//!   ◀── Ready ───────────────────────────
//!   ── Start(StartSpec) + descriptors ──▶   or MakeReady(StartSpec) + descriptors ──▶
//!                                           ◀── MadeReady(Making) ───────────────────
//!                                           ── Resume ──────────────────────────────▶
//!   ◀── Held ────────────────────────────   a player that is to wait
//!   ── Release ─────────────────────────▶
//!   ◀── Observe(thread) ─────────────────   where a trace is recorded
//!   ── Observed(Tracepoints) ───────────▶
//!   ◀── Note(text) ──────────────────────   any number of them
//!   ◀── Answered(Outcome) ───────────────   where the start has an event
//!   ◀── Started(StartReport) ────────────   or Failed(StartError)
//!   ── Pause ───────────────────────────▶   after a request, without an answer
//!   ── Unpause ─────────────────────────▶   before the next one
//!   ── End(signal) ─────────────────────▶   at any time; so does the end of the owner
//! ```

mod connection;
mod process;
mod serve;
mod setup;
mod supervisor;

use firn_agent::protocol::RoleCredentials;
use firn_vmm::{Shape, TracepointFormat};
use serde::{Deserialize, Serialize};

use crate::descriptors::Slot;
use crate::error::StartError;
use crate::outcome::Outcome;
use crate::report::{Making, StartReport};
use crate::spec::StartSpec;

pub use process::{Monitor, Progress};
pub use serve::serve;
pub use supervisor::Supervisor;

/// A message to a monitor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    /// Make the VM of a microVM of this shape in advance, and keep the connection to a pool's
    /// manager that comes with the order, if one does.
    StandBy {
        /// The shape.
        shape: Box<Shape>,
        /// The connection.
        manager: Option<Slot>,
    },
    /// Start a microVM. The descriptors of the spec come with the order.
    Start(Box<StartSpec>),
    /// Do all of this start that comes before the identity and the resume, and wait.
    MakeReady(Box<StartSpec>),
    /// Give the microVM that was made ready its identity, and resume it.
    Resume {
        /// When the request came in, ns of CLOCK_MONOTONIC.
        request_ns: u64,
        /// Keys of the function's role.
        credentials: Option<RoleCredentials>,
    },
    /// Open the snapshot of the spec and plan, without a start.
    Plan(Box<StartSpec>),
    /// The answer to [`Event::Observe`].
    Observed(Result<ThreadTracepoints, StartError>),
    /// Let a player that was [held](Event::Held) check its memory.
    Release,
    /// Pause the vCPUs of the microVM, which serves no request.
    Pause,
    /// Let them run for the next request.
    Unpause,
    /// End, as by a signal.
    End {
        /// The signal's number.
        signal: i32,
    },
}

/// What a monitor reports.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Event {
    /// The microVM is ready, has answered, or, a player, has ended.
    Started(Box<StartReport>),
    /// The planner has a plan for the snapshot: the shape of its microVM.
    Planned(Box<Shape>),
    /// The answer to [`Order::StandBy`]. If there is a text, it is why nothing was made.
    Ready(Option<String>),
    /// The answer to [`Order::MakeReady`].
    MadeReady(Box<Making>),
    /// What the microVM may take of memory, bytes. Comes once, before the guest's first
    /// instruction.
    Size {
        /// The guest's memory.
        memory: u64,
        /// What the guest writes to its disk, if that is in memory.
        disk: u64,
    },
    /// A thread's tracepoints of KVM are needed: its id in the monitor's pid namespace.
    Observe {
        /// The id.
        thread: u32,
    },
    /// A player has touched its last page and waits for [`Order::Release`].
    Held,
    /// The function has answered; the report, which has the answer too, follows.
    Answered(Box<Outcome>),
    /// Something that people should know.
    Note(String),
    /// The microVM did not start, or failed.
    Failed(StartError),
}

/// KVM's tracepoints of a thread of the monitor, open.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ThreadTracepoints {
    format: TracepointFormat,
    events: [Slot; 2],
}

#[cfg(test)]
mod tests;
