//! Functions and their invocations, above the monitor.
//!
//! - [`Function`] is a Python function on disk, checked and ready to be sent to a guest;
//! - [`FunctionSettings`] is what a function asks of its microVM: image, memory, vCPUs;
//! - [`AgentClient`] talks to the agent of one microVM through the monitor's vsock socket;
//! - [`Instances`] are the running microVMs of this user, by name;
//! - [`Identity`] is what makes one clone of a snapshot differ from every other.
//!
//! A start from a snapshot is: thaw, [`AgentClient::wait_for`], [`AgentClient::identify`],
//! [`AgentClient::invoke`]. Nothing that a guest sends is trusted: every wait has a limit, every
//! message a largest size.

mod agent;
mod function;
mod identity;
mod instance;
mod settings;

pub use agent::{
    AgentClient, Answer, ConnectError, EventError, ExchangeError, Failed, FunctionError,
    IdentifyError, Invocation, InvokeError, LoadError, LoadOptions, PrepareFreezeError, Refusal,
    RefusalKind, ShutdownError, Status, StatusError,
};
pub use function::{Function, FunctionPathError};
pub use identity::{Identity, IdentityError};
pub use instance::{ClaimError, FindError, Instance, Instances, MAX_NAME, OwnedInstance};
pub use settings::{FunctionSettings, ImageName, ImageNameError, SETTINGS_FILE, SettingsError};
