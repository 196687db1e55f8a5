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
    let thaw = thaw.map(|thaw| RawValue::from_string(thaw.to_string()).unwrap());
    let (queue_ns, start_ns, invoke_ns, total_ns) = (1_000, 50_000, 20_000, 80_000);
    Report {
        start,
        thaw_failed: false,
        boot: None,
        taken: None,
        queue_ns,
        start_ns,
        invoke_ns,
        total_ns,
        standby: true,
        thaw,
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
        "planner": "pass_shared", "read_bytes": 4096, "kvm": { "page_faults": 77 },
        "times": { "process_start_ns": 300, "load_ns": 1000, "plan_ns": 2000, "resume_ns": 5000, "identify_ns": 7000, "total_ns": 15300 },
    });
    let thawed = report(StartKind::thawed, Some(thaw));
    telemetry.invocation(&Ended {
        version: &version,
        request_id: "r1",
        parent: &parent(&headers),
        taken: Duration::from_nanos(80_000),
        report: Some(&thawed),
        failure: None,
    });
    let warm = report(StartKind::warm, None);
    telemetry.invocation(&Ended {
        version: &version,
        request_id: "r2",
        parent: &parent(&HeaderMap::new()),
        taken: Duration::from_nanos(80_000),
        report: Some(&warm),
        failure: Some("KeyError".to_owned()),
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
    let parts = children(root);
    assert_eq!(names(&parts), ["queue", "start", "invoke"]);
    assert_eq!(parts.iter().map(|span| length(span)).collect::<Vec<_>>(), [1_000, 50_000, 20_000]);
    let parts = children(parts[1]);
    assert_eq!(names(&parts), ["process_start", "load", "plan", "resume", "identify"]);
    assert_eq!(
        parts.iter().map(|span| length(span)).collect::<Vec<_>>(),
        [300, 1000, 2000, 5000, 7000]
    );
    assert!(
        parts.windows(2).all(|pair| pair[0].end_time_unix_nano == pair[1].start_time_unix_nano)
    );

    let warm = of("r2");
    assert!(warm.parent_span_id.is_empty());
    let status = warm.status.as_ref().unwrap();
    assert_eq!((status.code, status.message.as_str()), (2, "KeyError"));
    assert_eq!(names(&children(warm)), ["queue", "invoke"]);
}

#[test]
fn an_endpoint_that_is_none_is_refused() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let error = Telemetry::new("not a url").unwrap_err();
    assert!(error.to_string().contains("http://127.0.0.1:4318"), "{error}");
}
