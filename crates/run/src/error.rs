//! Why a microVM did not start, in a form that crosses processes.

use std::io;
use std::path::{Path, PathBuf};

use firn_agent::protocol::Failed;
use firn_base::ErrorChain;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::agent::LIMIT_OPTIONS;
use crate::console_tail::ConsoleTail;
use crate::jail::Wall;

/// Why a microVM did not start, or ended before it was to end.
///
/// Variants that a caller acts on carry fields. The others carry the causes as text
/// ([`ErrorChain`]), so that the same error reaches the command line, the daemon and a test, in one
/// process or from another.
#[derive(Clone, Debug, Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StartError {
    /// The monitor's process could not be started, or the connection to it broke.
    #[error(transparent)]
    Monitor(ErrorChain),
    /// The monitor lacks a wall of its jail.
    #[error(
        "the monitor cannot be jailed: this host gives it no wall {wall}: {reason}; with --jail auto it runs without, and \
         reports that"
    )]
    Jail {
        /// The wall.
        wall: Wall,
        /// Why it lacks it.
        reason: String,
    },
    /// The monitor did not report within the limit, seconds.
    #[error("the monitor did not report within {0} s ({LIMIT_OPTIONS})")]
    TimedOut(u64),
    /// The request is not valid.
    #[error("the start request is not valid: {0}")]
    Spec(String),
    /// Linux cannot run under this host's KVM.
    #[error(
        "this host's KVM has no hardware virtualisation (neither VT-x nor SVM), and a stock Linux guest does not \
         boot without it: run the command in the lab, as in `firn lab run -- firn ...`, or name a PVM guest kernel and give \
         --software-kvm"
    )]
    NoHardware,
    /// The planner is unknown, or its options are wrong.
    #[error(transparent)]
    Planner(ErrorChain),
    /// The snapshot cannot be opened.
    #[error(transparent)]
    Open(ErrorChain),
    /// The planner makes no plan for this snapshot on this host.
    #[error(transparent)]
    Plan(ErrorChain),
    /// The loader did not start.
    #[error(transparent)]
    Load(ErrorChain),
    /// This host cannot run the snapshot's machine.
    #[error(transparent)]
    Incompatible(ErrorChain),
    /// The snapshot of a ready clone is another one by now.
    #[error("the snapshot {0} was replaced or removed while a clone of it waited for its request")]
    Outdated(String),
    /// The plan could not be executed.
    #[error(transparent)]
    Execute(ErrorChain),
    /// A disk, a socket, the console or the directory for disk writes cannot be opened.
    #[error(transparent)]
    Host(ErrorChain),
    /// The machine could not be booted.
    #[error(transparent)]
    Boot(ErrorChain),
    /// The machine could not be restored.
    #[error(transparent)]
    Restore(ErrorChain),
    /// The vCPUs could not be started.
    #[error("cannot start the guest's processors")]
    Resume(#[source] ErrorChain),
    /// A step that the plan has after the resume failed, so the restore failed.
    #[error(transparent)]
    Schedule(ErrorChain),
    /// The kernel gave no random bytes for an identity.
    #[error(transparent)]
    Identity(ErrorChain),
    /// The guest's agent did not answer in time.
    #[error("{reason}{console}")]
    NoAgent {
        /// What failed, with its causes, so that the console comes last.
        reason: String,
        /// The end of the guest's console.
        console: ConsoleTail,
    },
    /// The agent did not take the clone's identity.
    #[error(transparent)]
    Identify(ErrorChain),
    /// The function itself failed, in an initialisation or in an after-restore hook.
    #[error("the function failed: {}", .0.error)]
    Function(Failed),
    /// The function could not be loaded.
    #[error(transparent)]
    LoadFunction(ErrorChain),
    /// The event is not valid.
    #[error(transparent)]
    Event(ErrorChain),
    /// The request did not reach the function, or its answer was lost.
    #[error(transparent)]
    Invoke(ErrorChain),
    /// The microVM ended while it was measured, or a counter cannot be read.
    #[error("cannot measure the microVM")]
    Measure(#[source] ErrorChain),
    /// Guest memory could not be compared with the image.
    #[error("cannot compare guest memory with the image")]
    Compare(#[source] ErrorChain),
    /// The run could not be recorded.
    #[error(transparent)]
    Record(ErrorChain),
    /// A thread, or the handling of signals, could not be set up.
    #[error(transparent)]
    Session(ErrorChain),
    /// Serving the microVM's devices failed.
    #[error(transparent)]
    Run(ErrorChain),
    /// The guest reset itself.
    #[error("the guest reset itself, which Linux does when it panics{0}")]
    Reset(ConsoleTail),
    /// The guest triple-faulted.
    #[error("the guest crashed with a triple fault{0}")]
    TripleFault(ConsoleTail),
    /// A vCPU could not continue.
    #[error("the microVM ended because its guest could not continue")]
    Failure(#[source] ErrorChain),
    /// The guest powered itself off before it was ready.
    #[error("the guest powered itself off before it was ready{0}")]
    Shutdown(ConsoleTail),
    /// A signal ended the microVM before it was ready.
    #[error("ended by signal {0}")]
    Signal(i32),
    /// The snapshot is not a player's.
    #[error("the snapshot is not a player's: make one with `firn player`")]
    NotPlayer,
    /// The player has no such trace.
    #[error("the snapshot's player does not replay {name}: its traces are {known}")]
    NoInput {
        /// The trace that was requested.
        name: String,
        /// The traces of the snapshot.
        known: String,
    },
    /// The player ended before its reports were complete.
    #[error("the player ended before its report: its program, lists or page tables are wrong")]
    Ended,
    /// The player found memory with wrong contents.
    #[error("{planner} restored wrong memory: {wrong}")]
    Wrong {
        /// The planner.
        planner: String,
        /// The wrong pages.
        wrong: String,
    },
}

/// Conversions of typed errors into the variant for their stage.
macro_rules! stages {
    ($($variant:ident: $($source:ty),+;)+) => {
        $($(impl From<$source> for StartError {
            fn from(error: $source) -> Self {
                Self::$variant(ErrorChain::of(&error))
            }
        })+)+
    };
}

stages! {
    Planner: firn_memory::planners::ParsePlannerError;
    Open: firn_snapshot::OpenError, firn_snapshot::OpenPooledError, firn_pool::ClientError,
        firn_memory::copy_ahead::RequestCopyError;
    Plan: firn_memory::planners::PlanSnapshotError;
    Load: firn_memory::loader::LoadError, firn_memory::BpfError;
    Incompatible: firn_vmm::IncompatibleError;
    Execute: firn_memory::ExecuteError, firn_memory::VerifyPlanError;
    Schedule: firn_memory::StepError;
    Host: firn_vmm::DiskError, firn_vmm::BindVsockError, firn_vmm::OpenFileError;
    Boot: firn_vmm::BootError;
    Restore: firn_vmm::RestoreError;
    Resume: firn_vmm::VcpuThreadError, firn_vmm::ReleaseError;
    Run: firn_vmm::RunError;
    Session: firn_vmm::ControlServerError, crate::ClaimError;
    Measure: firn_vmm::GoneError;
    Record: firn_memory::recorders::RecordError, firn_vmm::AttributionError,
        firn_vmm::GuestTimeError, firn_memory::trace::TraceError,
        firn_memory::trace::EncodeTraceError;
    Failure: firn_vmm::VcpuFailure;
    Identity: crate::IdentityError;
    Event: crate::EventError;
}

impl From<crate::IdentifyError> for StartError {
    fn from(error: crate::IdentifyError) -> Self {
        match error {
            crate::IdentifyError::Function(failed) => Self::Function(failed),
            error => Self::Identify(ErrorChain::of(&error)),
        }
    }
}

/// A file or socket of the host that a microVM needs.
#[derive(Debug, Error)]
#[error("cannot {action} {}", path.display())]
struct PathError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// What the process needs to serve a microVM.
#[derive(Debug, Error)]
#[error("cannot {action}")]
struct SessionError {
    action: &'static str,
    source: io::Error,
}

impl StartError {
    /// A file or socket of the host cannot be used: "cannot `action` `path`".
    pub(crate) fn path(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Host(ErrorChain::of(&PathError { action, path: path.to_owned(), source }))
    }

    /// A system call of the session failed: "cannot `action`".
    pub(crate) fn session(action: &'static str, source: io::Error) -> Self {
        Self::Session(ErrorChain::of(&SessionError { action, source }))
    }
}
