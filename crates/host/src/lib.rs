//! Functions and their invocations, above the monitor.
//!
//! - [`serve`] is the daemon: AWS Lambda's API in front of microVMs that it starts, keeps and ends;
//! - [`StatusClient`] asks a daemon what it is doing.

mod api;
mod daemon;
mod functions;
mod http_client;
mod instances;
mod metrics;
mod status_client;
mod store;
mod telemetry;

pub use api::{Credentials, CredentialsError};
pub use daemon::{ServeError, ServeOptions, serve};
pub use instances::{
    DaemonStatus, Latency, MemoryStatus, MonitorsStatus, ThawOrder, VersionStatus,
};
pub use status_client::{StatusClient, StatusClientError};
pub use store::StoreError;
pub use telemetry::TelemetryError;
