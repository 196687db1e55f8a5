//! Functions and their invocations, above the monitor.
//!
//! - [`Function`] is a Python function on disk, checked and ready to be sent to a guest;
//! - [`FunctionSettings`] is what a function asks of its microVM: image, memory, vCPUs;
//! - [`AgentClient`] talks to the agent of one microVM through the monitor's vsock socket;
//! - [`Instances`] are the running microVMs of this user, by name;
//! - [`Identity`] is what makes one clone of a snapshot differ from every other;
//! - [`serve`] is the daemon: AWS Lambda's API in front of microVMs that it starts, keeps and ends;
//! - [`StatusClient`] asks a daemon what it is doing.
//!
//! A start from a snapshot is: thaw, [`AgentClient::wait_for`], [`AgentClient::identify`],
//! [`AgentClient::invoke`]. Nothing that a guest sends is trusted: every wait has a limit, every
//! message a largest size.

mod agent;
mod api;
mod daemon;
mod function;
mod functions;
mod http_client;
mod identity;
mod instance;
mod instances;
mod metrics;
mod settings;
mod status_client;
mod store;
mod telemetry;

pub use agent::{
    AgentClient, Answer, ConnectError, EventError, ExchangeError, Failed, FunctionError,
    IdentifyError, Invocation, InvokeError, LambdaLoad, LoadError, LoadOptions, PrepareFreezeError,
    PutError, Refusal, RefusalKind, ShutdownError, Status, StatusError,
};
pub use api::{Credentials, CredentialsError};
pub use daemon::{ServeError, ServeOptions, serve};
pub use function::{Function, FunctionPathError};
pub use identity::{Identity, IdentityError};
pub use instance::{ClaimError, FindError, Instance, Instances, MAX_NAME, OwnedInstance};
pub use instances::{
    DaemonStatus, Latency, MemoryStatus, MonitorsStatus, ThawOrder, VersionStatus,
};
pub use settings::{FunctionSettings, ImageName, ImageNameError, SETTINGS_FILE, SettingsError};
pub use status_client::{StatusClient, StatusClientError};
pub use store::StoreError;
pub use telemetry::TelemetryError;
