//! The daemon: listens, and stops on a signal.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use firn_control::{Control, ControlOptions, OpenError, Telemetry};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

use crate::credentials::Credentials;
use crate::lambda::{self, Admission, Lambda, Scope};
use crate::monitoring;
use crate::otlp::{self, OtlpError};
use crate::server::{self, Buffer, Limits, Listen, Listener};
use crate::sts;

/// How long the daemon waits for requests in flight when it stops.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);

/// How long the daemon then waits until the last answers are sent.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The configuration of the daemon.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// What to listen on.
    pub listen: Listen,
    /// Names of this host for which requests without a signature are accepted, besides the loopback
    /// addresses.
    pub hosts: Vec<String>,
    /// Whether to listen on an address that other machines reach although there is no TLS.
    pub insecure: bool,
    /// Limits of connections and requests.
    pub limits: Limits,
    /// The account in ARNs: 12 digits.
    pub account: String,
    /// The keys with which clients sign their requests. `None` accepts all requests, on a loopback
    /// address only.
    pub credentials: Option<Credentials>,
    /// The OpenTelemetry collector for a span of each invocation: a URL.
    pub otlp: Option<String>,
    /// The configuration of the service.
    pub control: ControlOptions,
}

/// The daemon cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Other machines could send unsigned requests.
    #[error(
        "{0} is reachable from other machines: require signed requests with credentials, or listen on {loopback}",
        loopback = Ipv4Addr::LOCALHOST
    )]
    Unprotected(Listen),
    /// Other machines could read requests and answers.
    #[error(
        "{0} is reachable from other machines, and the daemon has no TLS: put a proxy with TLS before it and listen on \
         {loopback}, or pass --insecure in a network that you trust",
        loopback = Ipv4Addr::LOCALHOST
    )]
    Unencrypted(Listen),
    /// Spans cannot be exported.
    #[error(transparent)]
    Otlp(#[from] OtlpError),
    /// The daemon's state cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The address cannot be used.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: Listen,
        /// The cause.
        source: std::io::Error,
    },
    /// A system call of the server failed.
    #[error("the server cannot run")]
    System(#[source] std::io::Error),
}

/// Serves until SIGINT or SIGTERM. Calls `ready` with the address once the daemon listens.
///
/// # Errors
/// See [`ServeError`].
pub fn serve(options: &ServeOptions, ready: impl FnOnce(&Listen)) -> Result<(), ServeError> {
    if options.listen.is_remote() && options.credentials.is_none() {
        return Err(ServeError::Unprotected(options.listen.clone()));
    }
    if options.listen.is_remote() && !options.insecure {
        return Err(ServeError::Unencrypted(options.listen.clone()));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(ServeError::System)?;
    let served = runtime.block_on(run(options, ready));
    // Does not wait for the guests of requests that are still in flight: they end with this
    // process.
    runtime.shutdown_background();
    served
}

async fn run(options: &ServeOptions, ready: impl FnOnce(&Listen)) -> Result<(), ServeError> {
    let control = open(options)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::System)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::System)?;
    let listener = Listener::bind(&options.listen).await;
    let listener = listener
        .map_err(|source| ServeError::Listen { address: options.listen.clone(), source })?;
    control.recover().await?;
    let address = listener.address().map_err(ServeError::System)?;
    ready(&address);
    tracing::info!(%address, "listening");
    let (stop, stopped) = watch::channel(false);
    let (routes, limits) = (router(Arc::clone(&control), options), options.limits.clone());
    let serving =
        tokio::spawn(async move { server::run(listener, routes, &limits, stopped).await });
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tracing::info!("stopping");
    // Fails if the server has stopped meanwhile.
    let _ = stop.send(true);
    control.close(CLOSE_LIMIT).await;
    let _ = timeout(ANSWER_LIMIT, serving).await;
    control.flush_telemetry().await;
    Ok(())
}

/// Opens the service. Must run inside a Tokio runtime.
pub(crate) fn open(options: &ServeOptions) -> Result<Arc<Control>, ServeError> {
    let exporter = options.otlp.as_deref().map(otlp::exporter).transpose()?;
    Ok(Control::open(&options.control, exporter.map(Telemetry::new))?)
}

/// All routes of the daemon.
pub(crate) fn router(control: Arc<Control>, options: &ServeOptions) -> Router {
    let scope = Scope { region: options.control.region.clone(), account: options.account.clone() };
    let decoders = Arc::new(Semaphore::new(server::DECODERS));
    let account = scope.account.clone();
    let lambda = Lambda { control: Arc::clone(&control), scope: scope.clone(), decoders };
    let routes = lambda::routes(lambda).merge(monitoring::routes(Arc::clone(&control)));
    let routes = routes.merge(sts::routes(account));
    let credentials = options.credentials.clone();
    // Signatures contain the host, and no page in a browser connects to a unix socket.
    let local = credentials.is_none() && matches!(options.listen, Listen::Tcp(_));
    let admission = Admission {
        hosts: local.then(|| options.hosts.clone()),
        credentials: credentials.map(|found| (found, options.control.region.clone())),
        buffer: Buffer::new(options.limits.buffer),
        limits: options.limits.clone(),
        scope,
        control,
    };
    lambda::with_admission(routes, admission)
}
