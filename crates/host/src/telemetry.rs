//! A span for each invocation, with what its time went to as children, to an OpenTelemetry collector: OTLP over HTTP.
//!
//! The spans are made when the request has ended, from its report. The SDK's own variables (`OTEL_BSP_*`,
//! `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_EXPORTER_OTLP_HEADERS`, …) hold.

use std::collections::HashMap;
use std::pin::Pin;
use std::time::{Duration, SystemTime};

use axum::body::Bytes;
use axum::http::{HeaderMap, Request, Response};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{
    Span, SpanBuilder, SpanKind, Status, TraceContextExt, Tracer, TracerProvider,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::HttpError;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use serde_json::Value;
use tokio::runtime::Handle;

use crate::functions::Version;
use crate::http_client::HttpClient;
use crate::instances::Report;

/// Where a collector takes spans, below its endpoint (OTLP specification, "OTLP/HTTP request").
const TRACES: &str = "v1/traces";

/// The parts of a thaw, in the order in which they pass.
const PARTS: [&str; 6] = ["process_start", "load", "plan", "execute", "resume", "identify"];

/// What of a thaw's report becomes an attribute besides what every request has: its place, and the attribute's name.
const NUMBERS: [(&str, &str); 3] = [
    ("/kvm/page_faults", "firn.kvm_faults"),
    ("/pool_bytes", "firn.pool_bytes"),
    ("/copy_bytes", "firn.copy_bytes"),
];

/// Why spans cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The SDK refuses what it was given.
    #[error("exporting spans to {endpoint}: it has the form http://127.0.0.1:4318")]
    Exporter {
        /// The collector.
        endpoint: String,
        /// Why.
        source: opentelemetry_otlp::ExporterBuildError,
    },
}

/// Sends spans, in batches and in the background.
#[derive(Debug)]
pub(crate) struct Telemetry {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// A request that has ended.
#[derive(Debug)]
pub(crate) struct Ended<'a> {
    pub(crate) version: &'a Version,
    pub(crate) request_id: &'a str,
    /// The span that the client named as this one's parent.
    pub(crate) parent: &'a Context,
    pub(crate) report: &'a Report,
    /// What failed: the function, or firn.
    pub(crate) failure: Option<String>,
}

/// Sends on the daemon's runtime: the SDK's thread has none.
#[derive(Debug)]
struct OnRuntime {
    client: HttpClient,
    runtime: Handle,
}

impl opentelemetry_http::HttpClient for OnRuntime {
    // What `async_trait`, by which the trait is written, makes of an `async fn`.
    fn send_bytes<'life0, 'async_trait>(
        &'life0 self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        let client = self.client.clone();
        let sending = self.runtime.spawn(async move { client.send(request).await });
        Box::pin(async move { sending.await? })
    }
}

impl Telemetry {
    /// Sends to the collector at `endpoint`, a URL.
    pub(crate) fn new(endpoint: &str) -> Result<Self, TelemetryError> {
        let client = OnRuntime { client: HttpClient::new(), runtime: Handle::current() };
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_endpoint(format!("{}/{TRACES}", endpoint.trim_end_matches('/')))
            .build()
            .map_err(|source| TelemetryError::Exporter { endpoint: endpoint.to_owned(), source })?;
        let resource = Resource::builder().with_service_name("firn").build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource)
            .build();
        Ok(Self { tracer: provider.tracer("firn"), provider })
    }

    /// Makes the spans of a request that ends now.
    pub(crate) fn invocation(&self, ended: &Ended<'_>) {
        let end = SystemTime::now();
        let Ended { version, report, .. } = ended;
        let begin = end.checked_sub(Duration::from_nanos(report.total_ns)).unwrap_or(end);
        let mut attributes = vec![
            KeyValue::new("faas.name", version.function.clone()),
            KeyValue::new("faas.version", version.version.clone()),
            KeyValue::new("faas.invocation_id", ended.request_id.to_owned()),
        ];
        let thaw: Option<Value> =
            report.thaw.as_ref().and_then(|thaw| serde_json::from_str(thaw.get()).ok());
        if let Some(start) = report.start {
            attributes.push(KeyValue::new("faas.coldstart", start.is_new()));
            attributes.push(KeyValue::new("firn.start", start.name()));
            attributes.push(KeyValue::new("firn.standby", report.standby));
        }
        attributes.push(KeyValue::new("firn.thaw_failed", report.thaw_failed));
        if let Some(taken) = &report.taken {
            let numbers = [
                ("firn.faults", taken.faults),
                ("firn.read_bytes", taken.read_bytes),
                ("firn.private_bytes", taken.private_bytes),
                ("firn.shared_bytes", taken.shared_bytes),
            ];
            attributes.extend(numbers.into_iter().filter_map(count));
        }
        if let Some(thaw) = &thaw {
            let planner = thaw["planner"].as_str().map(ToOwned::to_owned);
            attributes.extend(planner.map(|planner| KeyValue::new("firn.planner", planner)));
            let number =
                |(place, name): (&str, &'static str)| count((name, thaw.pointer(place)?.as_u64()?));
            attributes.extend(NUMBERS.into_iter().filter_map(number));
        }
        let root = SpanBuilder::from_name(format!("invoke {}", version.function))
            .with_kind(SpanKind::Server)
            .with_start_time(begin)
            .with_attributes(attributes);
        let mut root = self.tracer.build_with_context(root, ended.parent);
        if let Some(failure) = &ended.failure {
            root.set_status(Status::error(failure.clone()));
        }
        let context = ended.parent.with_span(root);
        self.parts(&context, begin, report, thaw.as_ref());
        context.span().end_with_timestamp(end);
    }

    /// What the time of a request went to.
    fn parts(&self, context: &Context, begin: SystemTime, report: &Report, thaw: Option<&Value>) {
        let accepted = begin + Duration::from_nanos(report.accept_ns);
        self.part(context, "accept", begin, accepted);
        let queued = accepted + Duration::from_nanos(report.queue_ns);
        self.part(context, "queue", accepted, queued);
        let started = queued + Duration::from_nanos(report.start_ns);
        if report.start_ns > 0 {
            let start = self.child(context, "start", queued);
            let start = context.with_span(start);
            let mut at = queued;
            for part in PARTS {
                let ns = thaw.and_then(|thaw| thaw.pointer(&format!("/times/{part}_ns"))?.as_u64());
                let Some(ns) = ns else { continue };
                let next = at + Duration::from_nanos(ns);
                self.part(&start, part, at, next);
                at = next;
            }
            // A thaw that failed comes before them.
            if let (Some(boot), Some(load)) = (report.boot_ns, report.load_ns) {
                let booted = started.checked_sub(Duration::from_nanos(load)).unwrap_or(queued);
                let asked = booted.checked_sub(Duration::from_nanos(boot)).unwrap_or(queued);
                self.part(&start, "boot", asked, booted);
                self.part(&start, "load", booted, started);
            }
            start.span().end_with_timestamp(started);
        }
        if report.invoke_ns > 0 {
            self.part(context, "invoke", started, started + Duration::from_nanos(report.invoke_ns));
        }
    }

    fn child(
        &self,
        context: &Context,
        name: &'static str,
        begin: SystemTime,
    ) -> opentelemetry_sdk::trace::Span {
        let builder = SpanBuilder::from_name(name).with_start_time(begin);
        self.tracer.build_with_context(builder, context)
    }

    fn part(&self, context: &Context, name: &'static str, begin: SystemTime, end: SystemTime) {
        self.child(context, name, begin).end_with_timestamp(end);
    }

    /// Sends what is left. It waits: not for a thread of the runtime.
    pub(crate) fn end(&self) {
        if let Err(error) = self.provider.shutdown() {
            let error: &(dyn std::error::Error + 'static) = &error;
            tracing::warn!(error, "the last spans were not exported");
        }
    }
}

fn count((name, value): (&'static str, u64)) -> Option<KeyValue> {
    Some(KeyValue::new(name, i64::try_from(value).ok()?))
}

/// The span that a request names as its parent (W3C trace context, `traceparent`).
pub(crate) fn parent(headers: &HeaderMap) -> Context {
    let text = |name: &str| Some((name.to_owned(), headers.get(name)?.to_str().ok()?.to_owned()));
    let named: HashMap<String, String> =
        ["traceparent", "tracestate"].into_iter().filter_map(text).collect();
    TraceContextPropagator::new().extract_with_context(&Context::new(), &named)
}

#[cfg(test)]
#[path = "telemetry_tests.rs"]
mod tests;
