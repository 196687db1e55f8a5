//! Invocations: requests with an answer, and events, which the daemon retries.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use firn_run::Invocation;
use uuid::Uuid;

use super::backoff::Backoff;
use super::destinations::{Condition, Ended as EventEnded, Response, json_of};
use super::errors::{EventRefused, FindError, PrepareError};
use super::events::Event;
use super::{Control, Found, Hold};
use crate::functions::{Target, VersionState};
use crate::instances::{self, AnswerSender, Answering, Invoked, Request, Served, answering};
use crate::metrics::Outcome;
use crate::telemetry::{Ended, TraceContext};

/// How often an event is retried after an error of its function: AWS Lambda's default.
const RETRIES: u32 = 2;

/// A new X-Ray trace id, of a request that is not sampled.
fn new_trace_id() -> String {
    let seconds = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
    let (root, parent) = (Uuid::new_v4().simple().to_string(), Uuid::new_v4().as_u64_pair().0);
    format!("Root=1-{seconds:08x}-{};Parent={parent:016x};Sampled=0", &root[..24])
}

/// A request to a function.
#[derive(Debug)]
pub struct InvocationRequest {
    /// The function or version.
    pub target: Target,
    /// The event: JSON, or empty for `{}`.
    pub event: Vec<u8>,
    /// The ARN that the function finds in its context.
    pub function_arn: String,
    /// The client's context: JSON in one line.
    pub client_context: Option<String>,
    /// The X-Ray trace id; a new one by default, as in AWS Lambda.
    pub trace_id: Option<String>,
    /// The parent of the request's span.
    pub trace: TraceContext,
    /// When the request's head arrived.
    pub received: Instant,
    /// Dropped together with the event.
    pub hold: Hold,
}

/// A request that can be served.
#[derive(Debug)]
pub struct Prepared {
    target: Target,
    found: Found,
    invocation: Invocation,
    trace: TraceContext,
    received: Instant,
    hold: Hold,
}

impl Prepared {
    /// The request's id.
    #[must_use]
    pub fn request_id(&self) -> &str {
        self.invocation.request_id()
    }

    /// The version that serves the request.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.found.version.version
    }
}

impl Control {
    /// Finds the version that serves a request, and checks the event.
    ///
    /// # Errors
    /// See [`PrepareError`].
    pub async fn prepare(
        self: &Arc<Self>,
        request: InvocationRequest,
    ) -> Result<Prepared, PrepareError> {
        let InvocationRequest { target, event, received, trace, hold, .. } = request;
        let found = self.route(&target).await?;
        match &found.version.state {
            VersionState::Active => {}
            VersionState::Pending => return Err(PrepareError::Pending(target)),
            VersionState::Failed { reason } => {
                return Err(PrepareError::Failed { reason: reason.clone() });
            }
        }
        let event = if event.is_empty() { "{}" } else { std::str::from_utf8(&event)? };
        let limit = Duration::from_secs(found.version.timeout.into());
        let invocation = Invocation::new(event, limit)?
            .with_function_arn(Some(request.function_arn))
            .with_client_context(request.client_context)
            .with_trace_id(Some(request.trace_id.unwrap_or_else(new_trace_id)));
        Ok(Prepared { target, found, invocation, trace, received, hold })
    }

    /// Serves a request. The request continues if the caller drops the future.
    pub async fn invoke(self: &Arc<Self>, prepared: Prepared) -> Invoked {
        let control = Arc::clone(self);
        let Prepared { found, invocation, trace, received, hold, .. } = prepared;
        let task = tokio::spawn(async move {
            let invocation = Arc::new(invocation);
            let invoked = control.serve(found, invocation, received, &trace, &mut None).await;
            drop(hold);
            invoked
        });
        task.await.unwrap_or_else(Invoked::failed)
    }

    /// Serves a request, as [`Control::invoke`], and returns once the function begins to stream its
    /// answer.
    pub async fn stream(self: &Arc<Self>, prepared: Prepared) -> Answering {
        let control = Arc::clone(self);
        let Prepared { found, invocation, trace, received, hold, .. } = prepared;
        let (sender, beginning, parts) = AnswerSender::new();
        let task = tokio::spawn(async move {
            let (invocation, mut sender) = (Arc::new(invocation), Some(sender));
            let invoked = control.serve(found, invocation, received, &trace, &mut sender).await;
            drop(hold);
            Served { complete: sender.is_some_and(|sender| sender.is_complete()), invoked }
        });
        answering(beginning, parts, task).await
    }

    /// Accepts an event and serves it in the background. The daemon retries it as AWS Lambda does:
    /// by default twice after an error of the function, and with growing waits if there was no
    /// capacity or the daemon failed.
    ///
    /// # Errors
    /// See [`EventRefused`].
    pub async fn accept_event(self: &Arc<Self>, prepared: Prepared) -> Result<(), EventRefused> {
        let Prepared { target, invocation, trace, hold, .. } = prepared;
        let event = self.events.accept(target, invocation).await?;
        drop(hold);
        self.spawn_event(event, trace);
        Ok(())
    }

    /// Serves the events that earlier daemons have accepted.
    pub(super) fn recover_events(self: &Arc<Self>) -> io::Result<()> {
        for event in self.events.recover()? {
            self.spawn_event(event, TraceContext::default());
        }
        Ok(())
    }

    pub(super) fn spawn_event(self: &Arc<Self>, event: Event, trace: TraceContext) {
        let control = Arc::clone(self);
        tokio::spawn(async move {
            if control.serve_event(&event, &trace).await {
                event.done().await;
            }
        });
    }

    /// Returns whether the event was served or given up. Otherwise the next daemon serves it.
    pub(super) async fn serve_event(self: &Arc<Self>, event: &Event, trace: &TraceContext) -> bool {
        let target = event.target();
        let now = Instant::now();
        let mut backoff = Backoff::since(now.checked_sub(event.age()).unwrap_or(now));
        let (mut failures, mut attempts, mut response) = (0, 0, None);
        loop {
            // The function can change between attempts.
            let found = match self.route(target).await {
                Ok(found) => found,
                Err(error) => return matches!(error, FindError::NotFound(_)),
            };
            let settings = match self.event_settings(target).await {
                Ok(settings) => settings.unwrap_or_default(),
                Err(error) => return matches!(error, FindError::NotFound(_)),
            };
            if let Some(seconds) = settings.max_age {
                backoff.limit(Duration::from_secs(seconds.into()));
            }
            if backoff.allows(Duration::ZERO).is_none() {
                tracing::warn!(
                    function = target.name(),
                    request_id = event.request_id(),
                    "dropped an event that is too old"
                );
                let condition = Condition::EventAgeExceeded;
                let ended = EventEnded { condition, attempts, response };
                self.deliver(event, settings.on_failure.as_ref(), &ended).await;
                return true;
            }
            let version = found.version.version.clone();
            let invoked = match event.load().await {
                Ok(loaded) => {
                    let (invocation, now) = (loaded.invocation(), Instant::now());
                    self.serve(found, invocation, now, trace, &mut None).await
                }
                Err(error) => {
                    let error: &(dyn std::error::Error + 'static) = &error;
                    tracing::error!(
                        error,
                        function = target.name(),
                        request_id = event.request_id(),
                        "left an event that cannot be read"
                    );
                    return false;
                }
            };
            attempts += 1;
            let retries = settings.retries.unwrap_or(RETRIES);
            let failed =
                |payload| Some(Response { version: version.clone(), failed: true, payload });
            let wait = match invoked.outcome {
                Ok(Ok(answer)) => {
                    let condition = Condition::Success;
                    let payload = json_of(answer.payload);
                    let response = Some(Response { version, failed: false, payload });
                    let ended = EventEnded { condition, attempts, response };
                    self.deliver(event, settings.on_success.as_ref(), &ended).await;
                    return true;
                }
                Err(_) if self.fleet.is_closed() => return false,
                Err(error) if error.is_transient() => {
                    // A request that got no microVM did not invoke the function.
                    attempts -= u32::from(error.is_throttling());
                    backoff.next()
                }
                outcome => {
                    failures += 1;
                    response = failed(match outcome {
                        Ok(Err(of_function)) => {
                            serde_json::to_string(&of_function.error).unwrap_or_default()
                        }
                        outcome => {
                            let reason = outcome.err().map(|error| error.to_string());
                            serde_json::json!({ "errorMessage": reason }).to_string()
                        }
                    });
                    backoff.allows(self.event_pause * failures).filter(|_| failures <= retries)
                }
            };
            let Some(wait) = wait else {
                tracing::warn!(
                    function = target.name(),
                    request_id = event.request_id(),
                    "dropped an event after its last retry"
                );
                let condition = match failures > retries {
                    true => Condition::RetriesExhausted,
                    false => Condition::EventAgeExceeded,
                };
                let ended = EventEnded { condition, attempts, response };
                self.deliver(event, settings.on_failure.as_ref(), &ended).await;
                return true;
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// Serves a request once, and adds it to the counters, the traces and the log.
    async fn serve(
        &self,
        found: Found,
        invocation: Arc<Invocation>,
        received: Instant,
        parent: &TraceContext,
        sender: &mut Option<AnswerSender>,
    ) -> Invoked {
        let (id, version) = (found.function, Arc::new(found.version));
        let request_id = invocation.request_id().to_owned();
        let request = Request {
            version: Arc::clone(&version),
            concurrency: found.concurrency,
            invocation,
            received,
            accepted: Instant::now(),
        };
        let (fleet, code) = (Arc::clone(&self.fleet), self.code.clone());
        let invoked = instances::invoke(fleet, code, request, sender).await;
        let Invoked { outcome, report, log } = invoked;
        let (function, number) = (&version.function, &version.version);
        let failure = match &outcome {
            Ok(Ok(_)) => None,
            Ok(Err(failed)) => Some(failed.error.to_string()),
            Err(_) => report.reason.clone(),
        };
        let failed = failure.is_some();
        if let Some(telemetry) = &self.telemetry {
            let (version, request_id, report) = (&*version, request_id.as_str(), &report);
            telemetry.invocation(&Ended { version, request_id, parent, report, failure });
        }
        let ending = match &outcome {
            Ok(Ok(_)) => Outcome::answered,
            Ok(Err(_)) => Outcome::function_error,
            Err(failure) if failure.is_throttling() => Outcome::throttled,
            Err(_) => Outcome::failed,
        };
        self.fleet.metrics.ended(
            function,
            id,
            ending,
            || matches!(self.store.function(function), Ok(Some(stored)) if stored.id == id),
        );
        let latency =
            report.start.map(|start| (start, report.total_ns)).filter(|_| outcome.is_ok());
        self.fleet.count_request(&version, ending, latency);
        let json = report.json();
        match &outcome {
            Ok(_) => {
                tracing::info!(
                    function,
                    version = number,
                    request_id,
                    failed,
                    line = log.lines().last(),
                    report = json,
                    "invoked"
                );
            }
            Err(failure) => {
                let error: &(dyn std::error::Error + 'static) = failure;
                tracing::warn!(
                    function,
                    version = number,
                    request_id,
                    error,
                    report = json,
                    "not invoked"
                );
            }
        }
        Invoked { outcome, report, log }
    }
}
