use std::sync::Arc;

use opentelemetry::Value as Tagged;
use opentelemetry::trace::{SpanContext, SpanId, TraceId};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::SpanData;
use parking_lot::Mutex;

use super::*;
use crate::functions::testing::version;
use crate::instances::ProcessUsage;
use crate::metrics::StartKind;

/// Keeps the spans.
#[derive(Debug, Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<SpanData>>>,
    resource: Arc<Mutex<Option<Resource>>>,
}

impl SpanExporter for Collector {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.spans.lock().extend(batch);
        Ok(())
    }

    fn set_resource(&mut self, resource: &Resource) {
        *self.resource.lock() = Some(resource.clone());
    }
}

fn report(start: StartKind, thaw: Option<StartReport>) -> InvocationReport {
    let usage = ProcessUsage {
        faults: 77,
        read_bytes: 4096,
        private_bytes: 2 << 20,
        shared_bytes: 1 << 20,
    };
    InvocationReport {
        start: Some(start),
        thaw: thaw.map(Box::new),
        usage: Some(usage),
        accept_ns: 500,
        queue_ns: 1_000,
        start_ns: if start.is_new() { 50_000 } else { 0 },
        invoke_ns: 20_000,
        total_ns: 80_000,
        standby: true,
        ..InvocationReport::default()
    }
}

fn attribute(span: &SpanData, name: &str) -> Option<Tagged> {
    let found = span.attributes.iter().find(|attribute| attribute.key.as_str() == name)?;
    Some(found.value.clone())
}

fn length(span: &SpanData) -> u128 {
    span.end_time.duration_since(span.start_time).unwrap().as_nanos()
}

#[test]
fn a_request_has_a_span_and_a_child_span_for_each_part() {
    let collector = Collector::default();
    let telemetry = Telemetry::new(collector.clone());
    let version = version();
    let parent_id = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let parent = TraceContext::read(|name| (name == "traceparent").then(|| parent_id.to_owned()));
    let root = TraceContext::read(|_| None);
    let mut thaw = StartReport { planner: "pass_shared".to_owned(), ..StartReport::default() };
    thaw.counters.pool_bytes = 8192;
    thaw.counters.kvm.page_faults = 55;
    thaw.times = StartTimes {
        process_start_ns: Some(300),
        load_ns: 1000,
        plan_ns: 2000,
        resume_ns: 5000,
        identify_ns: Some(7000),
        total_ns: 15300,
        ..StartTimes::default()
    };
    let thawed = report(StartKind::thawed, Some(thaw));
    telemetry.invocation(&Ended {
        version: &version,
        request_id: "r1",
        parent: &parent,
        report: &thawed,
        failure: None,
    });
    let warm = report(StartKind::warm, None);
    telemetry.invocation(&Ended {
        version: &version,
        request_id: "r2",
        parent: &root,
        report: &warm,
        failure: Some("KeyError".to_owned()),
    });
    let cold = InvocationReport {
        boot_ns: Some(30_000),
        load_ns: Some(15_000),
        thaw_failed: true,
        ..report(StartKind::cold, None)
    };
    telemetry.invocation(&Ended {
        version: &version,
        request_id: "r3",
        parent: &root,
        report: &cold,
        failure: None,
    });
    let refused =
        InvocationReport { queue_ns: 1_000, total_ns: 1_500, ..InvocationReport::default() };
    telemetry.invocation(&Ended {
        version: &version,
        request_id: "r4",
        parent: &root,
        report: &refused,
        failure: Some("no microVM was free in time".to_owned()),
    });
    telemetry.shut_down();

    let resource = collector.resource.lock().take().unwrap();
    assert!(resource.iter().any(|(key, _)| key.as_str() == "service.name"));
    let spans = collector.spans.lock();
    let of = |request: &str| {
        let id = Some(Tagged::from(request.to_owned()));
        spans.iter().find(|span| attribute(span, "faas.invocation_id") == id).unwrap()
    };
    let children = |parent: &SpanData| {
        let id = SpanContext::span_id(&parent.span_context);
        let mut children: Vec<&SpanData> =
            spans.iter().filter(|span| span.parent_span_id == id).collect();
        children.sort_by_key(|span| span.start_time);
        children
    };
    let names =
        |spans: &[&SpanData]| spans.iter().map(|span| span.name.to_string()).collect::<Vec<_>>();

    let root = of("r1");
    let trace = TraceId::from_hex("0af7651916cd43dd8448eb211c80319c").unwrap();
    assert_eq!(root.span_context.trace_id(), trace);
    assert_eq!(root.parent_span_id, SpanId::from_hex("b7ad6b7169203331").unwrap());
    assert_eq!((root.name.as_ref(), length(root)), ("invoke f", 80_000));
    assert_eq!(attribute(root, "faas.coldstart"), Some(Tagged::Bool(true)));
    assert_eq!(attribute(root, "firn.standby"), Some(Tagged::Bool(true)));
    assert_eq!(attribute(root, "firn.planner"), Some(Tagged::from("pass_shared")));
    assert_eq!(attribute(root, "firn.faults"), Some(Tagged::I64(77)));
    assert_eq!(attribute(root, "firn.read_bytes"), Some(Tagged::I64(4096)));
    assert_eq!(attribute(root, "firn.kvm_faults"), Some(Tagged::I64(55)));
    assert_eq!(attribute(root, "firn.pool_bytes"), Some(Tagged::I64(8192)));
    let lengths = |spans: &[&SpanData]| spans.iter().map(|span| length(span)).collect::<Vec<_>>();
    let parts = children(root);
    assert_eq!(names(&parts), ["accept", "queue", "start", "invoke"]);
    assert_eq!(lengths(&parts), [500, 1_000, 50_000, 20_000]);
    let parts = children(parts[2]);
    assert_eq!(names(&parts), ["process_start", "load", "plan", "resume", "identify"]);
    assert_eq!(lengths(&parts), [300, 1000, 2000, 5000, 7000]);
    assert!(parts.windows(2).all(|pair| pair[0].end_time == pair[1].start_time));

    let warm = of("r2");
    assert_eq!(warm.parent_span_id, SpanId::INVALID);
    assert_eq!(warm.status, Status::error("KeyError"));
    assert_eq!(names(&children(warm)), ["accept", "queue", "invoke"]);
    assert_eq!(attribute(warm, "firn.faults"), Some(Tagged::I64(77)));

    let parts = children(of("r3"));
    assert_eq!(names(&parts), ["accept", "queue", "start", "invoke"]);
    let start = parts[2];
    let parts = children(start);
    assert_eq!(
        (names(&parts).as_slice(), lengths(&parts)),
        (&["boot", "load"].map(String::from)[..], vec![30_000, 15_000])
    );
    assert_eq!(
        parts[0].start_time,
        start.start_time + Duration::from_nanos(5_000),
        "the failed thaw"
    );
    assert_eq!(parts[1].end_time, start.end_time);

    let refused = of("r4");
    assert_eq!(attribute(refused, "firn.start"), None);
    assert_eq!(names(&children(refused)), ["accept", "queue"]);
}
