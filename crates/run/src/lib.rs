//! The life of a microVM.
//!
//! A start is a sequence of states, each made from the one before:
//!
//! ```text
//! StartSpec → Source → Planned → Mapped → Restored → Running → StartReport
//! ```
//!
//! - [`StartSpec`] names what to start; the descriptors that it refers to come with it as
//!   [`Descriptors`];
//! - [`Source`] is the opened snapshot, from a directory or a pool;
//! - [`Planned`] has the plan, [`Mapped`] guest memory, [`Restored`] the machine, [`Running`] runs;
//! - [`StartReport`] tells what was done, what it took and what it cost; [`StartError`] why it
//!   failed.
//!
//! [`start()`] goes through all of them in this process. [`monitor::Monitor`] has a process of its
//! own do it, by the same spec, with the same report and the same error, and
//! [`monitor::Supervisor`] follows one to its end. Two kinds of guest are
//! started: Linux with firn's agent, and the [`player`]. A start may be [recorded](RecordSpec), and
//! [`freeze()`] ends a life with a snapshot.
//!
//! What a running microVM with Linux is reached by:
//! - [`Instances`] are the running microVMs of this user, by name;
//! - [`AgentClient`] is the client of the agent in one guest, through the monitor's vsock socket;
//! - [`Identity`] is what makes one clone of a snapshot differ from every other;
//! - [`Function`] is a Python function on disk, ready to be sent to a guest.
//!
//! Nothing that a guest sends is trusted: every wait has a limit, every message a largest size.

mod agent;
mod background;
pub mod cgroup;
mod console_tail;
mod descriptors;
mod error;
mod freeze;
mod function;
mod guest;
mod holders;
mod host_security;
mod identity;
mod instance;
pub mod jail;
mod life;
mod linux;
pub mod monitor;
mod network;
mod outcome;
mod page_fault_handler;
pub mod player;
mod pool_manager;
mod recorded;
mod recording;
mod report;
mod session;
mod settings;
mod source;
mod spec;
mod start;

pub use agent::{
    AgentClient, Answer, AnswerSink, ConnectError, EventError, ExchangeError, Failed,
    FunctionError, IdentifyError, Invocation, InvokeError, LambdaLoad, LoadError, LoadOptions,
    NetworkAddresses, Pages, PagesError, PrepareFreezeError, PutError, Refusal, RefusalKind,
    RoleCredentials, RuntimeKind, ShutdownError, Status, StatusError, Usage,
};
pub use console_tail::ConsoleTail;
pub use descriptors::{Descriptors, Slot};
pub use error::StartError;
pub use freeze::{FreezeInstanceError, FreezeInstanceReport, freeze};
pub use function::{Function, FunctionPathError};
pub use guest::Listener;
pub use holders::{Holder, HoldersError, Touched, TouchedPage};
pub use host_security::{Exposure, HostSecurity, Ksm, Smt, UserNamespaces, Vulnerability};
pub use identity::{Identity, IdentityError};
pub use instance::{ClaimError, FindError, Instance, Instances, MAX_NAME, OwnedInstance};
pub use life::{Clock, KvmDevice, Mapped, Planned, Restored, Running};
pub use linux::require_linux;
pub use network::{MetadataSpec, NetworkEndSpec, NetworkSpec};
pub use outcome::Outcome;
pub use page_fault_handler::{HandOverError, PageFaultHandler};
pub use pool_manager::{MANAGER_HAS_CLIENTS, MANAGER_IN_USE, PoolManager, PoolManagerError};
pub use recorded::{RecordError, RecordedThaw, RecordingHost};
pub use recording::{RecordingFile, TraceTotals};
pub use report::{
    Counters, Making, REPORT_VERSION, ReadyUse, Replay, ReplicaCost, StandbyUse, StartReport,
    StartTimes,
};
pub use session::Interruption;
pub use settings::{FunctionSettings, ImageName, ImageNameError, SETTINGS_FILE, SettingsError};
pub use source::{Source, set_pooled_profile};
pub use spec::{
    BootSpec, HostSpec, InvokeSpec, OpenedFile, Origin, RecordSpec, Recorded, ReplaySpec,
    SPEC_VERSION, ScratchSpec, Sockets, SourceSpec, StartSpec, ThawSpec,
};
pub use start::start;
