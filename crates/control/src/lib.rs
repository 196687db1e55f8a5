//! Functions, their versions, and the microVMs that serve their requests. This crate contains no
//! protocol.
//!
//! [`Control`] is the service: it creates, changes, publishes and deletes functions, and serves
//! requests. Its operations return domain errors; a front door translates them to its protocol.
//!
//! - **functions**: names, configuration, code, versions, aliases, stored in a database;
//! - **admission**: limits of memory, microVMs, queued requests and requests in flight;
//! - **placement**: which idle or new microVM serves a request;
//! - **instances**: one `firn` process per microVM, and standby processes;
//! - **events**: requests without a waiting client, which the daemon retries;
//! - [`DaemonStatus`], counters and [`Telemetry`] report what the daemon does.

mod blocking;
mod functions;
mod instances;
mod metrics;
mod service;
mod store;
mod telemetry;

pub use blocking::TaskFailed;
pub use functions::{
    Alias, Code, CodeError, ConfigurationChange, ConfigurationError, Cors, Destination,
    EventSettings, Field, FunctionUrl, ImageError, ImageFiles, LATEST, LayerAbout, LayerName,
    LayerVersion, MAX_ENVIRONMENT, MAX_UNPACKED, MAX_ZIP, NameError, Permission, RolesError,
    Runtime, Target, UsedLayer, Version, VersionState,
};
pub use instances::{
    AcquireError, AnswerEvent, AnswerStream, Answering, BootFiles, DaemonStatus, FindTapsError,
    FunctionNetwork, InvocationReport, InvokeFailure, Invoked, Latency, LaunchError, LoadFailure,
    MemoryStatus, MonitorsStatus, Served, Shortage, TapDevices, VersionStatus,
};
pub use service::{
    Account, AliasChange, AliasError, AttachmentError, ChangeError, Claim, CodeChange, Control,
    ControlOptions, DeleteError, EventRefused, FindError, Found, Hold, InvalidTag,
    InvocationRequest, LayerTarget, MAX_PERMISSIONS, NewFunction, NewLayer, NotFound, OpenError,
    PrepareError, Prepared, ProvisionedError, ProvisionedStatus, PublishError, PublishRequest,
    QuotaError, Quotas, RevisionMismatch, Tenants, UrlRequest,
};
pub use store::StoreError;
pub use telemetry::{Telemetry, TraceContext};
