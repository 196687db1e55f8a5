use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Tagged;
use opentelemetry_proto::tonic::trace::v1::Span as Exported;
use prost::Message;
use serde_json::value::RawValue;

use super::*;
use crate::functions::Runtime;
use crate::instances::Taken;
use crate::metrics::StartKind;

type Collected = Arc<Mutex<Vec<ExportTraceServiceRequest>>>;

async fn collect(State(collected): State<Collected>, body: Bytes) {
    collected.lock().unwrap().push(ExportTraceServiceRequest::decode(body).unwrap());
}

/// A collector, on a port of its own.
async fn collector() -> (Collected, String) {
    let collected = Collected::default();
    let router = Router::new().route("/v1/traces", post(collect)).with_state(collected.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    (collected, format!("http://{address}/"))
}

fn version() -> Version {
    let latest: Value = serde_json::json!({
        "function": "f", "version": "3", "revision": uuid::Uuid::nil(), "last_modified": "", "code": { "sha256": "", "size": 0 },
        "runtime": Runtime::Python311, "handler": "h.h", "role": "r", "description": "", "timeout": 3, "memory": 128,
        "environment": {}, "snap_start": true, "state": "Active", "snapshot": null,
    });
    serde_json::from_value(latest).unwrap()
}

fn report(start: StartKind, thaw: Option<Value>) -> Report {
    let taken =
        Taken { faults: 77, read_bytes: 4096, private_bytes: 2 << 20, shared_bytes: 1 << 20 };
    Report {
        start: Some(start),
        thaw: thaw.map(|thaw| RawValue::from_string(thaw.to_string()).unwrap()),
        taken: Some(taken),
        accept_ns: 500,
        queue_ns: 1_000,
        start_ns: if start.is_new() { 50_000 } else { 0 },
        invoke_ns: 20_000,
        total_ns: 80_000,
        standby: true,
        ..Report::default()
    }
}

fn attribute(span: &Exported, name: &str) -> Option<Tagged> {
    let found = span.attributes.iter().find(|attribute| attribute.key == name)?;
    found.value.clone()?.value
}

fn length(span: &Exported) -> u64 {
    span.end_time_unix_nano - span.start_time_unix_nano
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_gets_a_span_for_a_request_and_children_for_its_parts() {
    let (collected, endpoint) = collector().await;
    let telemetry = Telemetry::new(&endpoint).unwrap();
    let version = version();
    let mut headers = HeaderMap::new();
    let parent_id = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    headers.insert("traceparent", parent_id.parse().unwrap());
    let thaw = serde_json::json!({
        "planner": "pass_shared", "pool_bytes": 8192, "kvm": { "page_faults": 55 },
        "times": { "process_start_ns": 300, "load_ns": 1000, "plan_ns": 2000, "resume_ns": 5000, "identify_ns": 7000, "total_ns": 15300 },
    });
    let thawed = report(StartKind::thawed, Some(thaw));
    telemetry.invocation(&Ended {
        version: &version,
        request_id: "r1",
        parent: &parent(&headers),
        report: &thawed,
        failure: None,
    });
    let warm = report(StartKind::warm, None);
    telemetry.invocation(&Ended {
        version: &version,
        request_id: "r2",
        parent: &parent(&HeaderMap::new()),
        report: &warm,
        failure: Some("KeyError".to_owned()),
    });
    let cold = Report {
        boot_ns: Some(30_000),
        load_ns: Some(15_000),
        thaw_failed: true,
        ..report(StartKind::cold, None)
    };
    telemetry.invocation(&Ended {
        version: &version,
        request_id: "r3",
        parent: &parent(&HeaderMap::new()),
        report: &cold,
        failure: None,
    });
    let refused = Report { queue_ns: 1_000, total_ns: 1_500, ..Report::default() };
    telemetry.invocation(&Ended {
        version: &version,
        request_id: "r4",
        parent: &parent(&HeaderMap::new()),
        report: &refused,
        failure: Some("no microVM was free in time".to_owned()),
    });
    tokio::task::spawn_blocking(move || telemetry.end()).await.unwrap();

    let requests = collected.lock().unwrap();
    let resources: Vec<_> = requests.iter().flat_map(|request| &request.resource_spans).collect();
    let service = resources[0].resource.as_ref().unwrap().attributes.iter();
    assert!(service.clone().any(|attribute| attribute.key == "service.name"));
    let spans: Vec<&Exported> = resources
        .iter()
        .flat_map(|resource| &resource.scope_spans)
        .flat_map(|scope| &scope.spans)
        .collect();
    let of = |request: &str| {
        let id = Some(Tagged::StringValue(request.to_owned()));
        *spans.iter().find(|span| attribute(span, "faas.invocation_id") == id).unwrap()
    };
    let children = |parent: &Exported| {
        let mut children: Vec<&Exported> =
            spans.iter().copied().filter(|span| span.parent_span_id == parent.span_id).collect();
        children.sort_by_key(|span| span.start_time_unix_nano);
        children
    };
    let names =
        |spans: &[&Exported]| spans.iter().map(|span| span.name.clone()).collect::<Vec<_>>();

    let root = of("r1");
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(hex(&root.trace_id), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(hex(&root.parent_span_id), "b7ad6b7169203331");
    assert_eq!((root.name.as_str(), length(root)), ("invoke f", 80_000));
    assert_eq!(attribute(root, "faas.coldstart"), Some(Tagged::BoolValue(true)));
    assert_eq!(attribute(root, "firn.standby"), Some(Tagged::BoolValue(true)));
    assert_eq!(
        attribute(root, "firn.planner"),
        Some(Tagged::StringValue("pass_shared".to_owned()))
    );
    assert_eq!(attribute(root, "firn.faults"), Some(Tagged::IntValue(77)));
    assert_eq!(attribute(root, "firn.read_bytes"), Some(Tagged::IntValue(4096)));
    assert_eq!(attribute(root, "firn.kvm_faults"), Some(Tagged::IntValue(55)));
    assert_eq!(attribute(root, "firn.pool_bytes"), Some(Tagged::IntValue(8192)));
    let lengths = |spans: &[&Exported]| spans.iter().map(|span| length(span)).collect::<Vec<_>>();
    let parts = children(root);
    assert_eq!(names(&parts), ["accept", "queue", "start", "invoke"]);
    assert_eq!(lengths(&parts), [500, 1_000, 50_000, 20_000]);
    let parts = children(parts[2]);
    assert_eq!(names(&parts), ["process_start", "load", "plan", "resume", "identify"]);
    assert_eq!(lengths(&parts), [300, 1000, 2000, 5000, 7000]);
    assert!(
        parts.windows(2).all(|pair| pair[0].end_time_unix_nano == pair[1].start_time_unix_nano)
    );

    let warm = of("r2");
    assert!(warm.parent_span_id.is_empty());
    let status = warm.status.as_ref().unwrap();
    assert_eq!((status.code, status.message.as_str()), (2, "KeyError"));
    assert_eq!(names(&children(warm)), ["accept", "queue", "invoke"]);
    assert_eq!(attribute(warm, "firn.faults"), Some(Tagged::IntValue(77)));

    let parts = children(of("r3"));
    assert_eq!(names(&parts), ["accept", "queue", "start", "invoke"]);
    let start = parts[2];
    let parts = children(start);
    assert_eq!(
        (names(&parts).as_slice(), lengths(&parts)),
        (&["boot", "load"].map(String::from)[..], vec![30_000, 15_000])
    );
    assert_eq!(
        parts[0].start_time_unix_nano,
        start.start_time_unix_nano + 5_000,
        "the failed thaw"
    );
    assert_eq!(parts[1].end_time_unix_nano, start.end_time_unix_nano);

    let refused = of("r4");
    assert_eq!(attribute(refused, "firn.start"), None);
    assert_eq!(names(&children(refused)), ["accept", "queue"]);
}

#[test]
fn an_endpoint_that_is_none_is_refused() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let error = Telemetry::new("not a url").unwrap_err();
    assert!(error.to_string().contains("http://127.0.0.1:4318"), "{error}");
}
