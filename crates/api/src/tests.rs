//! The API with its database but without microVMs: the `firn` program is one that fails.

use std::io::{Cursor, Write};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderValue, Request as HttpRequest};
use axum::routing::post;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use prost::Message;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tower::ServiceExt;
use zip::write::{SimpleFileOptions, ZipWriter};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use firn_control::{BootFiles, ControlOptions, ImageFiles, Tenants};

use crate::credentials::Credentials;
use crate::lambda::{REPORT, REQUEST_ID};
use crate::serve::{ServeOptions, open, router, serve};
use crate::server::{Limits, Listen};

/// A daemon's directory.
pub(crate) struct World {
    pub(crate) directory: TempDir,
}

/// A daemon on it.
pub(crate) struct Client {
    pub(crate) router: Router,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) kind: String,
    headers: axum::http::HeaderMap,
    pub(crate) text: String,
    body: Value,
}

impl World {
    pub(crate) fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    pub(crate) async fn start(&self) -> Client {
        self.start_with(|_| {}).await
    }

    pub(crate) fn options(&self) -> ServeOptions {
        ServeOptions {
            listen: Listen::Tcp((Ipv4Addr::LOCALHOST, 0).into()),
            hosts: Vec::new(),
            insecure: false,
            limits: Limits::default(),
            account: "123456789012".into(),
            credentials: None,
            otlp: None,
            control: ControlOptions {
                data: self.directory.path().join("data"),
                scratch: None,
                scratch_size: None,
                disk: None,
                recover: false,
                program: "/bin/false".into(),
                monitor_program: "/bin/false".into(),
                kvm: "/dev/kvm".into(),
                software_kvm: false,
                boot_files: BootFiles {
                    kernel: "/bin/false".into(),
                    initramfs: "/bin/false".into(),
                    root: "/bin/false".into(),
                    overlay: "/bin/false".into(),
                },
                images: Some(ImageFiles {
                    base: "/bin/false".into(),
                    folder: self.directory.path().join("images"),
                }),
                standby: 0,
                ready: 0,
                pool: None,
                snapshot_keys: None,
                planners: vec!["firecracker".into()],
                memory: 1 << 40,
                monitors: 9,
                jail: Default::default(),
                network: None,
                one_cpu: None,
                measured: true,
                queue: 9,
                event_bytes: 1 << 30,
                event_pause: Duration::ZERO,
                queue_wait: Duration::from_secs(60),
                keep_alive: Duration::from_secs(60),
                pause_idle: true,
                start_limit: Duration::from_secs(60),
                region: "eu-north-1".into(),
                roles: None,
                tenants: Tenants::default(),
            },
        }
    }

    pub(crate) async fn start_with(&self, change: impl FnOnce(&mut ServeOptions)) -> Client {
        let mut options = self.options();
        change(&mut options);
        let control = open(&options).unwrap();
        control.recover().await.unwrap();
        Client { router: router(control, &options) }
    }

    pub(crate) fn credentials(&self) -> Credentials {
        let file = self.directory.path().join("credentials");
        std::fs::write(&file, "aws_access_key_id = a\naws_secret_access_key = b\n").unwrap();
        Credentials::read(&file).unwrap()
    }

    pub(crate) fn files(&self, folder: &str) -> usize {
        std::fs::read_dir(self.directory.path().join("data").join(folder)).unwrap().count()
    }
}

impl Client {
    pub(crate) async fn send(
        &self,
        request: axum::http::request::Builder,
        body: impl Into<Body>,
    ) -> Answer {
        let mut request: HttpRequest<Body> = request.body(body.into()).unwrap();
        request.headers_mut().entry("host").or_insert(HeaderValue::from_static("127.0.0.1"));
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap();
        let text = |name: &str| {
            parts.headers.get(name).map_or("", |value| value.to_str().unwrap()).to_owned()
        };
        assert!(!text(REQUEST_ID).is_empty());
        Answer {
            status: parts.status.as_u16(),
            kind: text("x-amzn-errortype"),
            body: serde_json::from_slice(&body).unwrap_or_default(),
            text: String::from_utf8_lossy(&body).into_owned(),
            headers: parts.headers,
        }
    }

    /// Sends a request that is complete.
    pub(crate) async fn send_signed(&self, request: &HttpRequest<Bytes>) -> Answer {
        let mut again = HttpRequest::builder().method(request.method()).uri(request.uri());
        for (name, value) in request.headers() {
            again = again.header(name, value);
        }
        self.send(again, request.body().clone()).await
    }

    pub(crate) async fn ask(&self, method: &str, path: &str, body: &Value) -> Answer {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        self.send(HttpRequest::builder().method(method).uri(path), body).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &Value::Null).await
    }

    pub(crate) async fn create(&self, name: &str, more: &Value) -> Answer {
        let mut body = creation(name);
        merge(&mut body, more);
        self.ask("POST", "/2015-03-31/functions", &body).await
    }

    pub(crate) async fn created(&self, name: &str) -> Value {
        self.create(name, &json!({})).await.ok(201)
    }

    async fn invoke(&self, path: &str, body: &str) -> Answer {
        let path = format!("/2015-03-31/functions/{path}");
        self.send(HttpRequest::post(path), body.to_owned()).await
    }

    /// Waits until a version is not pending.
    async fn settled(&self, name: &str, version: &str) -> Value {
        loop {
            let path = format!("/2015-03-31/functions/{name}/configuration?Qualifier={version}");
            let found = self.get(&path).await.ok(200);
            if found["State"] != "Pending" {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Answer {
    #[track_caller]
    pub(crate) fn ok(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        self.body
    }

    /// A header; empty if there is none.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// The version that has served the request.
    pub(crate) fn executed_version(&self) -> &str {
        self.headers["x-amz-executed-version"].to_str().unwrap()
    }

    /// The report of the request.
    #[track_caller]
    fn report(&self) -> Value {
        serde_json::from_str(self.headers[&REPORT].to_str().unwrap()).unwrap()
    }

    #[track_caller]
    pub(crate) fn refused(self, status: u16, kind: &str) -> String {
        assert_eq!((self.status, self.kind.as_str()), (status, kind), "{self:?}");
        assert!(self.body["Type"].is_string(), "{self:?}");
        self.body["Message"].as_str().unwrap().to_owned()
    }
}

pub(crate) fn zip_of(source: &str) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    zip.start_file("handler.py", SimpleFileOptions::default()).unwrap();
    zip.write_all(source.as_bytes()).unwrap();
    zip.finish().unwrap().into_inner()
}

fn code_of(source: &str) -> Value {
    json!({ "ZipFile": STANDARD.encode(zip_of(source)) })
}

pub(crate) fn creation(name: &str) -> Value {
    json!({
        "FunctionName": name,
        "Runtime": "python3.11",
        "Handler": "handler.handler",
        "Role": "arn:aws:iam::123456789012:role/r",
        "Code": code_of("x = 1"),
    })
}

fn merge(document: &mut Value, more: &Value) {
    for (name, value) in more.as_object().unwrap() {
        document[name] = value.clone();
    }
}

const ONE: &str = "/2015-03-31/functions/f";

/// The folder with boto3, if this host has it.
pub(crate) fn clients() -> Option<PathBuf> {
    let folder = cache()?.join("clients");
    let has = firn_required::has("clients", folder.join("boto3").is_dir());
    has.then_some(folder)
}

/// Firn's cache.
pub(crate) fn cache() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    variable("FIRN_CACHE").or_else(|| Some(variable("HOME")?.join(".cache/firn")))
}

#[tokio::test]
async fn reserved_concurrency_limits_a_function() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    let (put, get) = ("/2017-10-31/functions/f/concurrency", "/2019-09-30/functions/f/concurrency");
    assert_eq!(client.get(get).await.ok(200), json!({}));
    let none = json!({ "ReservedConcurrentExecutions": 0 });
    assert_eq!(client.ask("PUT", put, &none).await.ok(200), none);
    assert_eq!(client.get(get).await.ok(200), none);
    let throttled = client.invoke("f/invocations", "1").await;
    assert_eq!(throttled.body["Reason"], "ReservedFunctionConcurrentInvocationLimitExceeded");
    assert_eq!(throttled.report()["reason"], "Rate Exceeded.");
    throttled.refused(429, "TooManyRequestsException");
    client.ask("DELETE", put, &Value::Null).await.ok(204);
    client.invoke("f/invocations", "1").await.refused(500, "ServiceException");
    let absent = "/2017-10-31/functions/g/concurrency";
    client.ask("PUT", absent, &none).await.refused(404, "ResourceNotFoundException");
    let negative = json!({ "ReservedConcurrentExecutions": -1 });
    client.ask("PUT", put, &negative).await.refused(400, "InvalidRequestContentException");
}

#[tokio::test]
async fn a_request_over_the_reserved_concurrency_is_refused_at_once() {
    let world = World::new();
    // A slow program and one microVM. Waiting requests count towards the limit.
    let place = |name: &str| world.directory.path().join(name);
    let (text, program, go) = (place("text"), place("slow"), place("go"));
    let script = format!("#!/bin/sh\nuntil [ -e {} ]; do sleep 0.01; done\nexit 1\n", go.display());
    std::fs::write(&text, script).unwrap();
    // Another process writes the program. A child process of another test could inherit this
    // process's descriptor, and a program that is open for writing cannot be run.
    let mut install = std::process::Command::new("install");
    assert!(install.arg(&text).arg(&program).status().unwrap().success());
    let change = |options: &mut ServeOptions| {
        options.control.monitor_program = program;
        options.control.monitors = 1;
    };
    let client = world.start_with(change).await;
    let one = json!({ "ReservedConcurrentExecutions": 1 });
    for name in ["f", "g"] {
        client.created(name).await;
        let put = format!("/2017-10-31/functions/{name}/concurrency");
        client.ask("PUT", &put, &one).await.ok(200);
    }
    let begin = |name: &'static str| {
        let client = Client { router: client.router.clone() };
        tokio::spawn(async move { client.invoke(&format!("{name}/invocations"), "1").await })
    };
    let until = async |field: &str, count: u64| {
        while client.get("/status").await.ok(200).pointer(field) != Some(&json!(count)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let starts = begin("f");
    until("/versions/0/starting", 1).await;
    let waits = begin("g");
    until("/queued", 1).await;
    for path in ["f/invocations", "g/invocations"] {
        let second = client.invoke(path, "1").await;
        assert_eq!(second.body["Reason"], "ReservedFunctionConcurrentInvocationLimitExceeded");
        second.refused(429, "TooManyRequestsException");
    }
    std::fs::write(&go, "").unwrap();
    for first in [starts, waits] {
        first.await.unwrap().refused(500, "ServiceException");
    }
    client.invoke("f/invocations", "1").await.refused(500, "ServiceException");
}

#[tokio::test]
async fn a_function_that_never_fits_is_refused_at_once() {
    let world = World::new();
    let client = world.start_with(|options| options.control.memory = 128 << 20).await;
    client.created("f").await;
    client.invoke("f/invocations", "1").await.refused(502, "ResourceNotReadyException");
}

#[tokio::test]
async fn lists_come_in_pages() {
    let world = World::new();
    let client = world.start().await;
    for name in ["a", "b", "c"] {
        client.created(name).await;
    }
    let mut names = Vec::new();
    let mut marker = String::new();
    loop {
        let path = format!("/2015-03-31/functions/?MaxItems=2&FunctionVersion=ALL{marker}");
        let listed = client.get(&path).await.ok(200);
        let functions = listed["Functions"].as_array().unwrap();
        names.extend(functions.iter().map(|f| f["FunctionName"].as_str().unwrap().to_owned()));
        let Some(next) = listed["NextMarker"].as_str() else { break };
        marker = format!("&Marker={next}");
    }
    assert_eq!(names, ["a", "b", "c"]);
}

#[tokio::test]
async fn a_restarted_daemon_keeps_its_functions() {
    let world = World::new();
    let client = world.start().await;
    let created = client.created("f").await;
    drop(client);
    // Files that a killed daemon leaves.
    let data = world.directory.path().join("data");
    std::fs::create_dir_all(data.join("snapshots/f-1-0123456789abcdef0123456789abcdef/x")).unwrap();
    std::fs::write(data.join("code/.firn-code-123"), "x").unwrap();
    let client = world.start().await;
    assert_eq!(client.get(&format!("{ONE}/configuration")).await.ok(200), created);
    assert_eq!((world.files("snapshots"), world.files("code")), (0, 1));
}

#[tokio::test]
async fn unsigned_requests_are_refused_if_there_are_credentials() {
    let world = World::new();
    let credentials = world.credentials();
    let client = world.start_with(|options| options.credentials = Some(credentials)).await;
    for path in ["/2015-03-31/functions/", "/metrics"] {
        client.get(path).await.refused(403, "MissingAuthenticationTokenException");
    }
    let file = world.directory.path().join("credentials");
    std::fs::write(&file, "[default]\n").unwrap();
    assert!(Credentials::read(&file).unwrap_err().to_string().contains("aws_access_key_id"));
}

#[test]
fn a_daemon_without_credentials_listens_on_loopback_only() {
    let world = World::new();
    let mut options = world.options();
    options.listen = Listen::Tcp((Ipv4Addr::UNSPECIFIED, 0).into());
    let error = serve(&options, |_| {}).unwrap_err();
    assert!(error.to_string().contains("credentials"), "{error}");
    options.credentials = Some(world.credentials());
    let error = serve(&options, |_| {}).unwrap_err();
    assert!(error.to_string().contains("--insecure"), "{error}");
}

#[tokio::test]
async fn metrics_count_the_outcomes_of_requests() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    client.invoke("f/invocations", "1").await.refused(500, "ServiceException");
    let request =
        HttpRequest::get("/metrics").header("host", "localhost").body(Body::empty()).unwrap();
    let response = client.router.clone().oneshot(request).await.unwrap();
    let text = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    for line in [
        "firn_invocations_total{function=\"f\",ending=\"failed\"} 1",
        "firn_start_failures_total 1",
        "firn_monitors 0",
        "# EOF",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
}

#[tokio::test]
async fn the_status_counts_requests_per_version() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    client.invoke("f/invocations", "1").await.refused(500, "ServiceException");
    let status = client.get("/status").await.ok(200);
    assert_eq!(status["monitors"], json!({ "limit": 9, "running": 0, "standby": 0 }));
    let version = &status["versions"][0];
    let counts = ["requests", "failed", "cold", "busy"].map(|name| version[name].as_u64().unwrap());
    assert_eq!((&version["function"], counts), (&json!("f"), [1, 1, 0, 0]), "{status}");
}

#[tokio::test]
async fn an_invalid_query_is_refused() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    let value = "InvalidParameterValueException";
    client.get("/2015-03-31/functions/?MaxItems=many").await.refused(400, value);
    client.get(&format!("{ONE}/versions?MaxItems=-1")).await.refused(400, value);
    client.get(&format!("{ONE}/versions?Marker=1")).await.refused(400, value);
    let rule = "ValidationException";
    client.get("/2015-03-31/functions/?MaxItems=0").await.refused(400, rule);
    client.get("/2015-03-31/functions/?FunctionVersion=1").await.refused(400, rule);
}

#[tokio::test]
async fn events_over_the_limit_are_refused() {
    let world = World::new();
    let client = world.start_with(|options| options.control.queue = 2).await;
    client.created("f").await;
    let event = || {
        let request = HttpRequest::post(format!("{ONE}/invocations"));
        client.send(request.header("x-amz-invocation-type", "Event"), "1")
    };
    // They fail, and are retried after a second.
    event().await.ok(202);
    event().await.ok(202);
    event().await.refused(429, "TooManyRequestsException");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_receives_the_span_of_a_request() {
    let (send, mut received) = tokio::sync::mpsc::unbounded_channel();
    let collect = async move |body: Bytes| send.send(body).unwrap();
    let collector = Router::new().route("/v1/traces", post(collect));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let endpoint = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, collector).await });

    let world = World::new();
    let mut options = world.options();
    options.otlp = Some(endpoint);
    let control = open(&options).unwrap();
    let client = Client { router: router(Arc::clone(&control), &options) };
    client.created("f").await;
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let request = HttpRequest::post(format!("{ONE}/invocations")).header("traceparent", parent);
    client.send(request, "1").await.refused(500, "ServiceException");
    control.flush_telemetry().await;

    let export = ExportTraceServiceRequest::decode(received.recv().await.unwrap()).unwrap();
    let spans = export.resource_spans.iter().flat_map(|spans| &spans.scope_spans);
    let spans: Vec<_> = spans.flat_map(|spans| &spans.spans).collect();
    let root = spans.iter().find(|span| span.name == "invoke f").unwrap();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(hex(&root.trace_id), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(hex(&root.parent_span_id), "b7ad6b7169203331");
    assert!(spans.iter().any(|span| span.name == "start"), "{spans:#?}");
}

#[path = "functions_tests.rs"]
mod functions;
