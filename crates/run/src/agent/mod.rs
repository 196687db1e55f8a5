//! The client of the guest's agent.

mod client;
mod connect;
mod errors;
#[cfg(test)]
mod tests;

pub use client::{AgentClient, Answer, AnswerSink, Invocation, LambdaLoad, LoadOptions};
pub(crate) use connect::Route;
pub(crate) use errors::LIMIT_OPTIONS;
pub use errors::{
    ConnectError, EventError, ExchangeError, IdentifyError, InvokeError, LoadError, PagesError,
    PrepareFreezeError, PutError, ShutdownError, StatusError,
};
pub use firn_agent::protocol::{
    Failed, FunctionError, NetworkAddresses, Pages, Refusal, RefusalKind, RoleCredentials,
    RuntimeKind, Status, Usage,
};
