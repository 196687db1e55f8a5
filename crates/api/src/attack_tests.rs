//! Attacks on the server over real connections.

mod descriptors;

use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::body::Bytes;
use axum::http::Request as HttpRequest;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::credentials::Credentials;
use crate::serve::{ServeOptions, open, router};
use crate::server::{self, Listen, Listener};
use crate::tests::{World, creation};

/// Long enough for any answer: the tests wait for events, not for time.
const LIMIT: Duration = Duration::from_secs(60);

const FUNCTIONS: &str = "/2015-03-31/functions/";

/// A daemon that listens, in a runtime of its own.
struct Server {
    address: Listen,
    _stop: watch::Sender<bool>,
    _runtime: tokio::runtime::Runtime,
    _world: World,
}

impl Server {
    fn start(change: impl FnOnce(&mut ServeOptions)) -> Self {
        let world = World::new();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let mut options = world.options();
        change(&mut options);
        let (stop, stopped) = watch::channel(false);
        let address = runtime.block_on(async {
            let control = open(&options).unwrap();
            let listener = Listener::bind(&options.listen).await.unwrap();
            let address = listener.address().unwrap();
            let routes = router(Arc::clone(&control), &options);
            let limits = options.limits.clone();
            tokio::spawn(async move { server::run(listener, routes, &limits, stopped).await });
            address
        });
        Self { address, _stop: stop, _runtime: runtime, _world: world }
    }

    fn tcp(&self) -> SocketAddr {
        match self.address {
            Listen::Tcp(address) => address,
            Listen::Unix(_) => panic!("a unix socket"),
        }
    }

    /// Connects and sends `text`.
    fn send(&self, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.tcp()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream
    }

    /// Lists the functions.
    fn list(&self) -> u16 {
        status(self.send(&head("GET", FUNCTIONS, "connection: close\r\n")))
    }
}

fn head(method: &str, path: &str, more: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n{more}\r\n")
}

/// The status of the answer; 0 if the server closed the connection without one.
fn status(mut stream: impl Read) -> u16 {
    // "HTTP/1.1 200"
    let mut text = [0; 12];
    if stream.read_exact(&mut text).is_err() {
        return 0;
    }
    let text = String::from_utf8_lossy(&text);
    text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

#[test]
fn idle_partial_requests_are_closed_for_new_ones() {
    let server = Server::start(|options| options.limits.connections = 8);
    let slow: Vec<TcpStream> = (0..40)
        .map(|n| match n % 2 {
            0 => server.send("POST /2015-03-31/functions HTTP/1.1\r\nhost: lo"),
            _ => server.send(&head("POST", FUNCTIONS, "content-length: 1000\r\n")),
        })
        .collect();
    for _ in 0..5 {
        assert_eq!(server.list(), 200);
    }
    drop(slow);
}

#[test]
fn partial_requests_and_unread_answers_end() {
    let server = Server::start(|options| {
        let limits = &mut options.limits;
        limits.head = Duration::from_millis(100);
        limits.body = Duration::from_millis(100);
        limits.answer = Duration::from_millis(100);
    });
    assert_eq!(status(server.send("GET / HT")), 0);
    let partial = head("POST", FUNCTIONS, "content-length: 10\r\n");
    assert_eq!(status(server.send(&partial)), 408);
    // An idle connection after an answer.
    assert_eq!(status(server.send(&head("GET", FUNCTIONS, ""))), 200);
}

#[test]
fn long_bodies_without_a_signature_are_not_read() {
    let world = World::new();
    let credentials = world.credentials();
    let server = Server::start(|options| options.credentials = Some(credentials));
    // The answer comes before the body.
    let announced = head("POST", FUNCTIONS, "content-length: 69000000\r\n");
    assert_eq!(status(server.send(&announced)), 403);
}

#[test]
fn a_body_over_the_limit_of_its_operation_is_not_read() {
    let server = Server::start(|_| {});
    let invoke = format!("{FUNCTIONS}f/invocations");
    for (method, path, length) in [
        ("POST", invoke.as_str(), (6 << 20) + 1),
        ("POST", "/2015-03-31/functions/f/aliases", (64 << 10) + 1),
        ("POST", FUNCTIONS, 80 << 20),
    ] {
        let announced = head(method, path, &format!("content-length: {length}\r\n"));
        assert_eq!(status(server.send(&announced)), 413, "{path}");
    }
}

#[test]
fn a_client_that_sends_before_it_reads_gets_the_error() {
    let server = Server::start(|_| {});
    let length = 16 << 20;
    let path = format!("{FUNCTIONS}f/invocations");
    let mut stream = server.send(&head("POST", &path, &format!("content-length: {length}\r\n")));
    stream.write_all(&vec![b' '; length]).unwrap();
    assert_eq!(status(&stream), 413);
    // The connection is still of use.
    stream.write_all(head("GET", FUNCTIONS, "").as_bytes()).unwrap();
    let mut text = String::new();
    while !text.contains("HTTP/1.1 200") {
        let mut part = [0; 256];
        let length = stream.read(&mut part).unwrap();
        assert!(length > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&part[..length]));
    }
}

#[test]
fn clients_that_stop_in_long_bodies_share_a_bounded_buffer() {
    const SENT: usize = 5 << 20;
    if !is_alone("clients_that_stop_in_long_bodies_share_a_bounded_buffer") {
        return;
    }
    let server = Server::start(|options| options.limits.buffer = 16 << 20);
    let before = resident();
    // Together 200 MiB, of which the server holds 16.
    let mut held = Vec::new();
    for _ in 0..40 {
        let mut stream = server.send(&head("POST", FUNCTIONS, "content-length: 69000000\r\n"));
        // Fails on a connection that the server has closed for another.
        let _ = stream.write_all(&vec![b' '; SENT]);
        held.push(stream);
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 100 << 20, "{grown}");
    // A shorter request gets room.
    let body = creation("f").to_string();
    let length = format!("content-length: {}\r\nconnection: close\r\n", body.len());
    assert_eq!(status(server.send(&(head("POST", FUNCTIONS, &length) + &body))), 201);
    drop(held);
}

/// Runs the test again in a process without other tests, whose memory it measures. Returns whether
/// this is that process.
fn is_alone(test: &str) -> bool {
    is_alone_in(test, std::path::Path::new("/nowhere"))
}

/// The same with a folder for running microVMs.
fn is_alone_in(test: &str, run: &std::path::Path) -> bool {
    const ALONE: &str = "FIRN_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    alone.env("FIRN_RUN_DIR", run);
    // The allocator gives long buffers back when they are freed (mallopt(3)): what is measured is
    // what the process holds.
    alone.env("MALLOC_MMAP_THRESHOLD_", (1 << 20).to_string());
    alone.env(ALONE, "1").args([&format!("attack_tests::{test}"), "--exact", "--nocapture"]);
    assert!(alone.status().unwrap().success());
    false
}

/// Resident anonymous memory of this process, bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[tokio::test]
async fn requests_of_pages_in_browsers_are_refused() {
    let world = World::new();
    let client = world.start_with(|options| options.hosts = vec!["firn.example".to_owned()]).await;
    let list = |name: &str, value: &str| HttpRequest::get(FUNCTIONS).header(name, value);
    for host in ["evil.test", "evil.test:9700", "127.0.0.1.evil.test", "localhost.evil.test", ""] {
        client.send(list("host", host), "").await.refused(403, "AccessDeniedException");
    }
    let both = list("host", "localhost").header("host", "evil.test");
    client.send(both, "").await.refused(403, "AccessDeniedException");
    for host in ["localhost", "LOCALHOST:9700", "127.0.0.1:9700", "[::1]:9700", "firn.example"] {
        client.send(list("host", host), "").await.ok(200);
    }
    for origin in ["http://evil.test", "null", "https://localhost", "http://localhost:3000"] {
        let foreign = list("host", "localhost:9700").header("origin", origin);
        client.send(foreign, "").await.refused(403, "AccessDeniedException");
    }
    let own = list("host", "localhost:9700").header("origin", "http://localhost:9700");
    client.send(own, "").await.ok(200);

    client.created("f").await;
    let one = "/2015-03-31/functions/f";
    let form = "multipart/form-data; boundary=x";
    for kind in ["text/plain;charset=UTF-8", "application/x-www-form-urlencoded", form] {
        for (method, path) in
            [("POST", FUNCTIONS), ("DELETE", one), ("PUT", "/2015-03-31/functions/f/configuration")]
        {
            let request = HttpRequest::builder().method(method).uri(path);
            let request = request.header("content-type", kind);
            let refused = client.send(request, creation("g").to_string()).await;
            refused.refused(415, "UnsupportedMediaTypeException");
        }
    }
    let listed = client.get(FUNCTIONS).await.ok(200);
    assert_eq!(listed["Functions"].as_array().unwrap().len(), 1, "{listed}");
}

#[test]
fn a_unix_socket_belongs_to_its_user() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("firn.sock");
    // A socket that a killed daemon left.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = Server::start(|options| options.listen = Listen::Unix(path.clone()));
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut stream = UnixStream::connect(&path).unwrap();
    let list = format!("GET {FUNCTIONS} HTTP/1.1\r\nhost: firn\r\nconnection: close\r\n\r\n");
    stream.write_all(list.as_bytes()).unwrap();
    assert_eq!(status(stream), 200);
    drop(server);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_document_takes_little_more_memory_than_its_bytes() {
    if !is_alone("a_document_takes_little_more_memory_than_its_bytes") {
        return;
    }
    let world = World::new();
    let client = world.start().await;
    let long = "x".repeat(40 << 20);
    for field in [
        format!("\"Unknown\":[{}0]", "0,".repeat(20 << 20)),
        format!("\"Layers\":[{}\"\"]", "\"\",".repeat(13 << 20)),
        format!("\"Environment\":{{\"Variables\":{{\"A\":\"{long}\"}}}}"),
    ] {
        let mut document = creation("f").to_string();
        document.pop();
        let document = format!("{document},{field}}}");
        let before = resident();
        let high = watch_memory();
        let answer = client.send(HttpRequest::post(FUNCTIONS), document).await;
        answer.refused(413, "RequestEntityTooLargeException");
        // The server copies the body once.
        let grown = high().saturating_sub(before);
        assert!(grown < 100 << 20, "{grown}");
    }
}

/// Samples the memory of this process until the returned function is called, which returns the
/// highest value.
fn watch_memory() -> impl FnOnce() -> usize {
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let sampler = std::thread::spawn(move || {
        let mut high = resident();
        while stopped
            .recv_timeout(Duration::from_millis(1))
            .is_err_and(|e| e == std::sync::mpsc::RecvTimeoutError::Timeout)
        {
            high = high.max(resident());
        }
        high
    });
    move || {
        drop(stop);
        sampler.join().unwrap()
    }
}

#[tokio::test]
async fn long_events_wait_on_the_disk_within_a_limit() {
    let world = World::new();
    let change = |options: &mut ServeOptions| {
        options.control.queue = 1000;
        options.control.event_bytes = 20 << 20;
    };
    let client = world.start_with(change).await;
    client.created("f").await;
    let long = json!("x".repeat(4 << 20)).to_string();
    let event = || {
        let request = HttpRequest::post("/2015-03-31/functions/f/invocations");
        client.send(request.header("x-amz-invocation-type", "Event"), long.clone())
    };
    // They fail, and are retried after a second.
    for _ in 0..4 {
        event().await.ok(202);
    }
    event().await.refused(429, "TooManyRequestsException");
    assert_eq!(world.files("events"), 4);
    let status = client.get("/status").await;
    assert_ne!(status.ok(200), Value::Null);
}

fn signed(keys: &Credentials, method: &str, path: &str, body: &Value) -> HttpRequest<Bytes> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let request = HttpRequest::builder().method(method).uri(format!("http://firn{path}"));
    let mut request = request.body(Bytes::from(body)).unwrap();
    keys.sign(&mut request, "eu-north-1", SystemTime::now());
    request
}

/// Each of two equal requests is served by the program that runs microVMs, which fails.
#[tokio::test]
async fn a_recorded_invocation_is_served_each_time() {
    let world = World::new();
    let credentials = world.credentials();
    let guard = |options: &mut ServeOptions| options.credentials = Some(credentials.clone());
    let client = world.start_with(guard).await;
    let creation = signed(&credentials, "POST", FUNCTIONS, &creation("f"));
    client.send_signed(&creation).await.ok(201);
    let path = "/2015-03-31/functions/f/invocations";
    let invocation = signed(&credentials, "POST", path, &json!({ "name": "Ada" }));
    for runs in 1..=2 {
        client.send_signed(&invocation).await.refused(500, "ServiceException");
        let status = signed(&credentials, "GET", "/status", &Value::Null);
        let status = client.send_signed(&status).await.ok(200);
        assert_eq!(status["versions"][0]["requests"], runs, "{status}");
    }
}

#[tokio::test]
async fn a_recorded_change_gets_the_first_answer_again() {
    let world = World::new();
    let credentials = world.credentials();
    let guard = |options: &mut ServeOptions| options.credentials = Some(credentials.clone());
    let client = world.start_with(guard).await;
    let sign = |method: &str, path: &str, body: &Value| signed(&credentials, method, path, body);
    let creation = sign("POST", FUNCTIONS, &creation("f"));
    let created = client.send_signed(&creation).await.ok(201);
    let one = "/2015-03-31/functions/f";
    let version = sign("POST", &format!("{one}/versions"), &json!({ "Description": "x" }));
    let published = client.send_signed(&version).await.ok(201);
    let update = sign("PUT", &format!("{one}/configuration"), &json!({ "Timeout": 9 }));
    let updated = client.send_signed(&update).await.ok(200);
    let missing = sign("DELETE", "/2015-03-31/functions/g", &Value::Null);
    client.send_signed(&missing).await.refused(404, "ResourceNotFoundException");
    let deletion = sign("DELETE", one, &Value::Null);
    client.send_signed(&deletion).await.ok(204);

    let replayed = async |client: &crate::tests::Client| {
        assert_eq!(client.send_signed(&creation).await.ok(201), created);
        assert_eq!(client.send_signed(&version).await.ok(201), published);
        assert_eq!(client.send_signed(&update).await.ok(200), updated);
        client.send_signed(&missing).await.refused(404, "ResourceNotFoundException");
        client.send_signed(&deletion).await.ok(204);
        let find = sign("GET", one, &Value::Null);
        for _ in 0..2 {
            client.send_signed(&find).await.refused(404, "ResourceNotFoundException");
        }
    };
    replayed(&client).await;
    drop(client);
    replayed(&world.start_with(guard).await).await;
}

#[tokio::test]
async fn more_changes_than_are_kept_are_refused() {
    let world = World::new();
    let credentials = world.credentials();
    let guard = |options: &mut ServeOptions| options.credentials = Some(credentials.clone());
    let client = world.start_with(guard).await;
    let delete = |number: u32| {
        let path = format!("/2015-03-31/functions/f{number}");
        signed(&credentials, "DELETE", &path, &Value::Null)
    };
    let first = delete(0);
    client.send_signed(&first).await.refused(404, "ResourceNotFoundException");
    for number in 1..4096 {
        client.send_signed(&delete(number)).await.refused(404, "ResourceNotFoundException");
    }
    client.send_signed(&delete(4096)).await.refused(429, "TooManyRequestsException");
    // What was answered is answered again, and reads change nothing.
    client.send_signed(&first).await.refused(404, "ResourceNotFoundException");
    let list = signed(&credentials, "GET", FUNCTIONS, &Value::Null);
    client.send_signed(&list).await.ok(200);
}

/// Has the daemon start monitors that hang.
fn hang(world: &World, options: &mut ServeOptions) {
    let program = world.directory.path().join("monitor");
    std::fs::write(&program, "#!/bin/sh\nexec sleep 100000\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    options.control.monitor_program = program;
    options.control.start_limit = Duration::from_secs(3600);
}

/// One event is served, by a microVM that hangs; the others wait for a microVM, or for memory.
#[test]
fn long_events_that_wait_take_a_bounded_share_of_memory() {
    const EVENTS: usize = 60;
    const BYTES: usize = 4 << 20;
    // As many as the memory for them holds are read again, and one of those is served.
    const MOST: u64 = 15;
    let folder = tempfile::tempdir().unwrap();
    let test = "long_events_that_wait_take_a_bounded_share_of_memory";
    if !is_alone_in(test, &folder.path().join("run")) {
        return;
    }
    let world = World::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (grown, queued) = runtime.block_on(async {
        let mut options = world.options();
        hang(&world, &mut options);
        (options.control.monitors, options.control.queue) = (1, 1000);
        options.control.event_bytes = 4 << 30;
        let control = open(&options).unwrap();
        let client = crate::tests::Client { router: router(Arc::clone(&control), &options) };
        client.created("f").await;
        let before = resident();
        for _ in 0..EVENTS {
            let event = json!("x".repeat(BYTES - 2)).to_string();
            let request = HttpRequest::post("/2015-03-31/functions/f/invocations");
            client.send(request.header("x-amz-invocation-type", "Event"), event).await.ok(202);
        }
        let (mut queued, mut polls) = (0, 0);
        while polls < 50 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            queued = client.get("/status").await.ok(200)["queued"].as_u64().unwrap();
            polls += u32::from(queued >= MOST);
        }
        let grown = resident().saturating_sub(before);
        control.close(Duration::from_secs(3600)).await;
        (grown, queued)
    });
    runtime.shutdown_background();
    println!("{EVENTS} events of {BYTES} bytes: {} MiB", grown >> 20);
    assert_eq!(queued, MOST);
    assert_eq!(world.files("events"), EVENTS);
    assert!(grown < 160 << 20, "{grown}");
}

#[test]
fn a_daemon_that_stops_cuts_off_starts_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    if !is_alone_in("a_daemon_that_stops_cuts_off_starts_and_leaves_nothing", &run) {
        // The process has ended, and its microVM with it.
        assert_eq!(std::fs::read_dir(run).unwrap().count(), 0);
        return;
    }
    let run = std::path::PathBuf::from(std::env::var_os("FIRN_RUN_DIR").unwrap());
    // The socket of a manager that was killed.
    std::fs::DirBuilder::new().mode(0o700).create(&run).unwrap();
    let dead = run.join("pool-1-2.sock");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    let world = World::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut options = world.options();
        hang(&world, &mut options);
        let control = open(&options).unwrap();
        assert!(!dead.exists());
        let client = crate::tests::Client { router: router(Arc::clone(&control), &options) };
        client.created("f").await;
        let path = "/2015-03-31/functions/f/invocations";
        let invoked = tokio::spawn(async move { client.send(HttpRequest::post(path), "").await });
        while std::fs::read_dir(&run).map_or(0, Iterator::count) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Far longer than the test may take: it ends when the start has ended.
        control.close(Duration::from_secs(3600)).await;
        assert_eq!(std::fs::read_dir(&run).unwrap().count(), 0);
        assert_eq!(invoked.await.unwrap().status, 500);
    });
    runtime.shutdown_background();
}

#[tokio::test]
async fn what_is_not_the_daemons_own_stays() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    drop(client);
    let data = world.directory.path().join("data");
    let stored = world.files("code");
    let kept = ["snapshots/backup/notes", "snapshots/f-1-mine/x", "code/notes.txt", "code/a.zip"];
    for name in kept {
        let path = data.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "kept").unwrap();
    }
    let unused = data.join("snapshots/f-1-0123456789abcdef0123456789abcdef");
    std::fs::create_dir(&unused).unwrap();
    world.start().await.get("/2015-03-31/functions/f").await.ok(200);
    assert!(kept.iter().all(|name| data.join(name).exists()) && !unused.exists());

    // Without its database, the daemon does not start and removes nothing.
    std::fs::remove_file(data.join("state.redb")).unwrap();
    let error = open(&world.options()).unwrap_err().to_string();
    assert!(error.contains("firn serve --recover"), "{error}");
    assert_eq!(world.files("code"), stored + 2);
    let recovered = world.start_with(|options| options.control.recover = true).await;
    recovered.get("/2015-03-31/functions/f").await.ok(200);
    assert_eq!(world.files("code"), stored + 2);
}
