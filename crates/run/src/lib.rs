//! The life of a microVM.
//!
//! - [`Function`] is a Python function on disk, checked and ready to be sent to a guest;
//! - [`FunctionSettings`] is what a function requires of its microVM: image, memory, vCPUs;
//! - [`AgentClient`] is the client of the agent in one guest, through the monitor's vsock socket;
//! - [`Instances`] are the running microVMs of this user, by name;
//! - [`Identity`] is what makes one clone of a snapshot differ from every other.
//!
//! Nothing that a guest sends is trusted: every wait has a limit, every message a largest size.

mod agent;
mod function;
mod identity;
mod instance;
mod settings;

pub use agent::{
    AgentClient, Answer, ConnectError, EventError, ExchangeError, Failed, FunctionError,
    IdentifyError, Invocation, InvokeError, LambdaLoad, LoadError, LoadOptions, PrepareFreezeError,
    PutError, Refusal, RefusalKind, ShutdownError, Status, StatusError,
};
pub use function::{Function, FunctionPathError};
pub use identity::{Identity, IdentityError};
pub use instance::{ClaimError, FindError, Instance, Instances, MAX_NAME, OwnedInstance};
pub use settings::{FunctionSettings, ImageName, ImageNameError, SETTINGS_FILE, SettingsError};
