//! An OpenTelemetry span for each invocation, with a child span for each of its parts.
//!
//! The spans are built from the report of a request after the request has ended. The environment
//! variables of the SDK (`OTEL_BSP_*`, `OTEL_RESOURCE_ATTRIBUTES`, …) apply.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use firn_run::{ReadyUse, StartReport, StartTimes};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{
    Span, SpanBuilder, SpanKind, Status, TraceContextExt, Tracer, TracerProvider,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, SpanExporter};

use crate::functions::Version;
use crate::instances::InvocationReport;

/// Exports a span for each request.
#[derive(Debug)]
pub struct Telemetry {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// The parent span that a request's client names, if any.
#[derive(Debug, Clone, Default)]
pub struct TraceContext(Context);

/// A request that has ended.
#[derive(Debug)]
pub(crate) struct Ended<'a> {
    pub(crate) version: &'a Version,
    pub(crate) request_id: &'a str,
    /// The parent of the request's span.
    pub(crate) parent: &'a TraceContext,
    pub(crate) report: &'a InvocationReport,
    /// The error of the function or of the daemon.
    pub(crate) failure: Option<String>,
}

impl Telemetry {
    /// Sends spans to `exporter`, in batches and in the background.
    #[must_use]
    pub fn new(exporter: impl SpanExporter + 'static) -> Self {
        let resource = Resource::builder().with_service_name("firn").build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource)
            .build();
        Self { tracer: provider.tracer("firn"), provider }
    }

    /// Exports the spans of a request that has just ended.
    pub(crate) fn invocation(&self, ended: &Ended<'_>) {
        let end = SystemTime::now();
        let Ended { version, report, .. } = ended;
        let begin = end.checked_sub(Duration::from_nanos(report.total_ns)).unwrap_or(end);
        let mut attributes = vec![
            KeyValue::new("faas.name", version.function.clone()),
            KeyValue::new("faas.version", version.version.clone()),
            KeyValue::new("faas.invocation_id", ended.request_id.to_owned()),
        ];
        if let Some(start) = report.start {
            attributes.push(KeyValue::new("faas.coldstart", start.is_new()));
            attributes.push(KeyValue::new("firn.start", start.name()));
            attributes.push(KeyValue::new("firn.standby", report.standby));
        }
        attributes.push(KeyValue::new("firn.thaw_failed", report.thaw_failed));
        if let Some(usage) = &report.usage {
            let numbers = [
                ("firn.faults", usage.faults),
                ("firn.read_bytes", usage.read_bytes),
                ("firn.private_bytes", usage.private_bytes),
                ("firn.shared_bytes", usage.shared_bytes),
            ];
            attributes.extend(numbers.into_iter().filter_map(count));
        }
        if let Some(thaw) = &report.thaw {
            attributes.push(KeyValue::new("firn.planner", thaw.planner.clone()));
            if let Some(found) = thaw.ready {
                attributes.push(KeyValue::new("firn.ready", found == ReadyUse::Hit));
            }
            let numbers = [
                ("firn.kvm_faults", thaw.counters.kvm.page_faults),
                ("firn.pool_bytes", thaw.counters.pool_bytes),
                ("firn.copy_bytes", thaw.counters.copy_bytes),
            ];
            attributes.extend(numbers.into_iter().filter_map(count));
        }
        let root = SpanBuilder::from_name(format!("invoke {}", version.function))
            .with_kind(SpanKind::Server)
            .with_start_time(begin)
            .with_attributes(attributes);
        let mut root = self.tracer.build_with_context(root, &ended.parent.0);
        if let Some(failure) = &ended.failure {
            root.set_status(Status::error(failure.clone()));
        }
        let context = ended.parent.0.with_span(root);
        self.parts(&context, begin, report);
        context.span().end_with_timestamp(end);
    }

    /// Exports the child spans of a request.
    fn parts(&self, context: &Context, begin: SystemTime, report: &InvocationReport) {
        let accepted = begin + Duration::from_nanos(report.accept_ns);
        self.part(context, "accept", begin, accepted);
        let queued = accepted + Duration::from_nanos(report.queue_ns);
        self.part(context, "queue", accepted, queued);
        let started = queued + Duration::from_nanos(report.start_ns);
        if report.start_ns > 0 {
            let start = self.child(context, "start", queued);
            let start = context.with_span(start);
            let mut at = queued;
            for (name, ns) in report.thaw.iter().flat_map(|thaw| thaw_parts(thaw)) {
                let next = at + Duration::from_nanos(ns);
                self.part(&start, name, at, next);
                at = next;
            }
            // A failed thaw comes before the boot.
            if let (Some(boot), Some(load)) = (report.boot_ns, report.load_ns) {
                let booted = started.checked_sub(Duration::from_nanos(load)).unwrap_or(queued);
                let requested = booted.checked_sub(Duration::from_nanos(boot)).unwrap_or(queued);
                self.part(&start, "boot", requested, booted);
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

    /// Exports the remaining spans. Blocks, so it must not run on a thread of the runtime.
    pub fn shut_down(&self) {
        if let Err(error) = self.provider.shutdown() {
            let error: &(dyn std::error::Error + 'static) = &error;
            tracing::warn!(error, "cannot export the last spans");
        }
    }
}

/// The measured parts of a thaw in order, ns.
fn thaw_parts(report: &StartReport) -> impl Iterator<Item = (&'static str, u64)> {
    let StartTimes { process_start_ns, load_ns, plan_ns, execute_ns, resume_ns, .. } = report.times;
    let parts = [
        ("process_start", process_start_ns),
        ("load", Some(load_ns)),
        ("plan", Some(plan_ns)),
        ("execute", Some(execute_ns)),
        ("resume", Some(resume_ns)),
        ("identify", report.times.identify_ns),
    ];
    parts.into_iter().filter_map(|(name, ns)| Some((name, ns.filter(|ns| *ns > 0)?)))
}

fn count((name, value): (&'static str, u64)) -> Option<KeyValue> {
    Some(KeyValue::new(name, i64::try_from(value).ok()?))
}

impl TraceContext {
    /// Reads the fields `traceparent` and `tracestate` (W3C Trace Context). `field` returns the
    /// value of a field. A missing or invalid parent makes the request the root of a new trace.
    pub fn read(field: impl Fn(&str) -> Option<String>) -> Self {
        let fields: HashMap<String, String> = ["traceparent", "tracestate"]
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), field(name)?)))
            .collect();
        Self(TraceContextPropagator::new().extract_with_context(&Context::new(), &fields))
    }
}

#[cfg(test)]
#[path = "telemetry_tests.rs"]
mod tests;
