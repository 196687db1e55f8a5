//! The daemon: listens, and stops on a signal.

use std::future::IntoFuture;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use firn_control::{Control, ControlOptions, OpenError, Telemetry};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::lambda::{self, Lambda, Scope};
use crate::monitoring;
use crate::otlp::{self, OtlpError};
use crate::sigv4::Credentials;

/// How long the daemon waits for requests in flight when it stops.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);

/// How long the daemon then waits until the last answers are sent.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The configuration of the daemon.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The address to listen on. The kernel replaces port 0 by a free port.
    pub listen: SocketAddr,
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
    Unprotected(IpAddr),
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
        address: SocketAddr,
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
pub fn serve(options: &ServeOptions, ready: impl FnOnce(SocketAddr)) -> Result<(), ServeError> {
    if !options.listen.ip().is_loopback() && options.credentials.is_none() {
        return Err(ServeError::Unprotected(options.listen.ip()));
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

async fn run(options: &ServeOptions, ready: impl FnOnce(SocketAddr)) -> Result<(), ServeError> {
    let control = open(options)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::System)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::System)?;
    let address = options.listen;
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(|source| ServeError::Listen { address, source })?;
    control.recover().await?;
    let address = listener.local_addr().map_err(ServeError::System)?;
    ready(address);
    tracing::info!(%address, "listening");
    let (stop, stopped) = oneshot::channel::<()>();
    let served = axum::serve(listener, router(Arc::clone(&control), options))
        .with_graceful_shutdown(async move { drop(stopped.await) });
    let mut serving = tokio::spawn(served.into_future());
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        ended = &mut serving => {
            return ended.unwrap_or_else(|failed| Err(failed.into())).map_err(ServeError::System);
        }
    }
    tracing::info!("stopping");
    // Fails if the server has stopped meanwhile.
    let _ = stop.send(());
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
    let lambda = Lambda { control: Arc::clone(&control), scope };
    let routes = lambda::routes(lambda).merge(monitoring::routes(control));
    lambda::with_authorization(routes, options.credentials.clone())
}
