//! The client against the real server, and against guests that break the protocol. In the place of
//! the monitor is a thread that answers `CONNECT`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Ipv4Addr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use firn_agent::protocol::{
    Base64Bytes, KernelSymbols, MAX_ANSWER_BYTES, MAX_EVENT_BYTES, MAX_PART_BYTES,
    MAX_REPLY_LENGTH, MAX_REQUEST_LENGTH, Reply, Request, receive, write_frame,
};
use firn_agent::serve::{Machine, RuntimeConfig, Server};
use firn_vmm::VsockListener;
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

use super::*;
use crate::{Function, Identity, StartError};

const LIMIT: Duration = Duration::from_secs(120);

/// What holds the pages of [`Untouched`].
fn pages() -> Pages {
    let holders = vec!["kernel: code".to_owned(), "a: heap".to_owned()];
    let symbols = vec![(0, "_text".to_owned())];
    let kernel = Some(KernelSymbols { text: 1 << 63, page: 0, symbols });
    Pages { holders, runs: vec![(0, 2), (1, 1)], kernel }
}

/// A machine to which nothing is done.
struct Untouched;

impl Machine for Untouched {
    fn reseed(&self, _entropy: &[u8]) -> io::Result<()> {
        Ok(())
    }
    fn set_clock(&self, _wall_clock_ns: u64) -> io::Result<()> {
        Ok(())
    }
    fn set_host_name(&self, _name: &str) -> io::Result<()> {
        Ok(())
    }
    fn set_network(&self, _addresses: &NetworkAddresses) -> io::Result<()> {
        Ok(())
    }
    fn set_metadata(
        &self,
        _earlier: Option<Ipv4Addr>,
        _address: Option<Ipv4Addr>,
    ) -> io::Result<()> {
        Ok(())
    }
    fn publish_generation(&self, _generation: Uuid) -> io::Result<()> {
        Ok(())
    }
    fn pages(&self) -> io::Result<Pages> {
        Ok(pages())
    }
    fn sync(&self) {}
    fn settle(&self) {}
    fn power_off(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A folder for a socket and a function.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn socket(&self) -> PathBuf {
        self.0.path().join("vsock")
    }

    /// Serves a guest whose agent is the real one.
    fn serve(&self) {
        let config = RuntimeConfig {
            python: "python3".into(),
            task_dir: self.0.path().join("task"),
            layers_dir: self.0.path().join("layers"),
            runtime_dir: "/nowhere".into(),
            runtime_api: ([127, 0, 0, 1], 0).into(),
            user: None,
            counters: "/nowhere".into(),
            min_ttl_ms: "/nowhere".into(),
            freezer: None,
        };
        let server = Server::new(config, Box::new(Untouched));
        let listener = UnixListener::bind(self.socket()).unwrap();
        thread::spawn(move || {
            server
                .serve(listener.incoming().map(|stream| stream.inspect(|s| accept(s, b"OK 7\n"))));
        });
    }

    /// Serves one connection by `guest`, after the monitor's `greeting`.
    fn serve_once(&self, greeting: &'static [u8], guest: fn(UnixStream)) {
        let listener = UnixListener::bind(self.socket()).unwrap();
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            accept(&stream, greeting);
            guest(stream);
        });
    }

    fn connect(&self) -> AgentClient {
        AgentClient::connect(&self.socket(), LIMIT).unwrap()
    }

    fn function(&self, source: &str) -> Function {
        let path = self.0.path().join("function.py");
        fs::write(&path, source).unwrap();
        Function::from_path(&path).unwrap()
    }
}

/// Reads the monitor's `CONNECT` and answers it.
fn accept(mut stream: &UnixStream, greeting: &[u8]) {
    let mut line = String::new();
    // One byte at a time: what follows is the agent's.
    BufReader::with_capacity(1, stream).read_line(&mut line).unwrap();
    assert_eq!(line, "CONNECT 1024\n");
    stream.write_all(greeting).unwrap();
}

/// A guest that greets, reads one request, and sends `reply`.
fn greet_and_reply(mut stream: &UnixStream, reply: &[u8]) {
    receive::<Request>(&mut stream, MAX_REQUEST_LENGTH).unwrap();
    write_frame(&mut stream, br#"{"hello":{"version":1}}"#, 100).unwrap();
    receive::<Request>(&mut stream, MAX_REQUEST_LENGTH).unwrap();
    stream.write_all(reply).unwrap();
}

fn frame(payload: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_frame(&mut bytes, payload.as_bytes(), MAX_REPLY_LENGTH).unwrap();
    bytes
}

fn options() -> LoadOptions {
    LoadOptions { time_limit: LIMIT, memory_mib: 256, environment: [].into() }
}

fn invocation(event: &Value) -> Invocation {
    Invocation::new(&event.to_string(), LIMIT).unwrap()
}

fn exchange_error(result: Result<Answer, InvokeError>) -> ExchangeError {
    match result {
        Err(InvokeError::Exchange(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_function_is_loaded_frozen_identified_and_invoked() {
    let place = Place::new();
    place.serve();
    let function = place.function(
        "import os\n\
         print('imported')\n\
         def handler(event, context):\n\
         \x20   print('asked')\n\
         \x20   return [event, os.environ['FIRN_INSTANCE_ID'], context.aws_request_id]\n",
    );
    let mut client = place.connect();
    assert_eq!(client.load(&function, &options()).unwrap(), "imported\n");
    client.prepare_freeze(LIMIT).unwrap();

    let mut client = AgentClient::wait_for(Route::Socket(&place.socket()), LIMIT, || true).unwrap();
    let early = client.invoke(&invocation(&json!(1))).unwrap_err();
    assert!(early.is_not_identified(), "{early}");
    let identity = Identity::fresh().unwrap();
    client.identify(&identity, LIMIT).unwrap();
    let request = invocation(&json!({"a": 1}));
    let answer = client.invoke(&request).unwrap();
    let expected = json!([{"a": 1}, identity.instance_id, request.request_id()]);
    assert_eq!(serde_json::from_slice::<Value>(&answer.payload).unwrap(), expected);
    assert_eq!(answer.logs, "asked\n");

    assert_eq!(client.pages(LIMIT).unwrap(), pages());
    let status = client.status().unwrap();
    assert_eq!((status.function.as_deref(), status.open), (Some("function"), true));
    client.shut_down().unwrap();
}

#[test]
fn errors_of_the_function_come_with_their_parts() {
    let place = Place::new();
    place.serve();
    let mut client = place.connect();
    match client.load(&place.function("import nothing_like_that"), &options()) {
        Err(LoadError::Function(failed)) => {
            assert_eq!(failed.error.error_type, "Runtime.ImportModuleError");
        }
        other => panic!("{other:?}"),
    }
    let raises = "def handler(event, context):\n    print('now')\n    raise ValueError('no good')";
    client.load(&place.function(raises), &options()).unwrap();
    client.identify(&Identity::fresh().unwrap(), LIMIT).unwrap();
    let error = client.invoke(&invocation(&json!(1))).unwrap_err();
    assert_eq!(error.to_string(), "the function failed: ValueError: no good");
    match error {
        InvokeError::Function(Failed { error, logs, .. }) => {
            assert_eq!((&*logs, error.frames.unwrap().lines().len()), ("now\n", 1));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_function_that_exceeds_the_limit_of_its_load_names_the_options() {
    let place = Place::new();
    place.serve();
    let hangs = place.function("import time\ntime.sleep(600)");
    let limit = LoadOptions { time_limit: Duration::from_millis(50), ..options() };
    let error = place.connect().load(&hangs, &limit).unwrap_err().to_string();
    assert!(error.contains("Init timed out") && error.contains("--time-limit"), "{error}");
    let error = StartError::TimedOut(3).to_string();
    assert!(error.contains("--start-limit"), "{error}");
}

#[test]
fn an_event_is_checked_before_it_is_sent() {
    assert!(matches!(Invocation::new("{", LIMIT), Err(EventError::NotJson(_))));
    assert!(matches!(Invocation::new("NaN", LIMIT), Err(EventError::NotJson(_))));
    let long = format!("\"{}\"", "x".repeat(MAX_EVENT_BYTES));
    assert!(matches!(Invocation::new(&long, LIMIT), Err(EventError::TooLong { .. })));
}

#[test]
fn the_monitor_s_own_connection_has_errors_with_the_socket_s_path() {
    let place = Place::new();
    let listener = VsockListener::bind(&place.socket()).unwrap();
    let (connector, socket) = (listener.connector(), place.socket());
    let route = Route::Inside { connector: &connector, socket: &socket };
    let limit = Duration::from_millis(20);
    let never = AgentClient::wait_for(route, limit, || true).unwrap_err();
    assert!(matches!(never, ConnectError::NeverListened { .. }), "{never}");
    drop(listener);
    let ended = AgentClient::wait_for(route, LIMIT, || false).unwrap_err();
    assert!(matches!(&ended, ConnectError::Ended { socket } if *socket == place.socket()));
    let gone = AgentClient::wait_for(route, Duration::ZERO, || true).unwrap_err();
    let ConnectError::NeverListened { source, .. } = gone else { panic!("{gone}") };
    assert!(matches!(&*source, ConnectError::Gone { .. }), "{source}");
}

#[test]
fn a_microvm_that_is_gone_is_an_error_at_once() {
    let place = Place::new();
    let error = AgentClient::connect(&place.socket(), LIMIT).unwrap_err();
    assert!(matches!(error, ConnectError::Gone { .. }), "{error:?}");
    drop(UnixListener::bind(place.socket()).unwrap());
    let error = AgentClient::connect(&place.socket(), LIMIT).unwrap_err();
    assert!(matches!(error, ConnectError::Gone { .. }), "nobody listens: {error:?}");
    fs::remove_file(place.socket()).unwrap();
    place.serve_once(b"", drop);
    let error = AgentClient::connect(&place.socket(), LIMIT).unwrap_err();
    assert!(matches!(error, ConnectError::NotListening { .. }), "{error:?}");
    let long = Path::new("/").join("x".repeat(200));
    let error = AgentClient::connect(&long, LIMIT).unwrap_err();
    assert!(matches!(error, ConnectError::Socket { .. }), "{error:?}");
}

#[test]
fn a_guest_that_starts_is_waited_for_as_long_as_it_lives() {
    let place = Place::new();
    let mut asked = 0;
    let client = AgentClient::wait_for(Route::Socket(&place.socket()), LIMIT, || {
        asked += 1;
        if asked == 3 {
            place.serve();
        }
        true
    });
    assert!(client.is_ok() && asked >= 3, "{client:?}");

    let place = Place::new();
    let ended = AgentClient::wait_for(Route::Socket(&place.socket()), LIMIT, || false).unwrap_err();
    assert!(matches!(ended, ConnectError::Ended { .. }), "{ended:?}");
    let limit = Duration::from_millis(5);
    let never = AgentClient::wait_for(Route::Socket(&place.socket()), limit, || true).unwrap_err();
    assert!(matches!(never, ConnectError::NeverListened { .. }), "{never:?}");
    assert!(never.to_string().contains("--time-limit"), "{never}");
}

#[test]
fn what_is_no_monitor_is_named() {
    let greetings: [&[u8]; 5] = [b"HTTP/1.1 400\n", b"OK\n", b"OK \n", b"OK 1x\n", &[b'9'; 64]];
    for greeting in greetings {
        let place = Place::new();
        place.serve_once(greeting, drop);
        let error = AgentClient::connect(&place.socket(), LIMIT).unwrap_err();
        assert!(matches!(error, ConnectError::NotAMonitor { .. }), "{error:?}");
    }
}

#[test]
fn an_agent_of_another_age_is_named() {
    let place = Place::new();
    place.serve_once(b"OK 1\n", |mut stream| {
        receive::<Request>(&mut stream, MAX_REQUEST_LENGTH).unwrap();
        let refusal = frame(r#"{"refused":{"kind":"version","message":"too old"}}"#);
        stream.write_all(&refusal).unwrap();
    });
    let error = AgentClient::connect(&place.socket(), LIMIT).unwrap_err();
    assert!(matches!(&error, ConnectError::Version(_)), "{error:?}");
    assert!(error.to_string().contains("too old"), "{error}");
}

#[test]
fn a_guest_that_never_replies_is_given_up_and_not_asked_again() {
    let place = Place::new();
    place.serve_once(b"OK 1\n", |mut stream| {
        greet_and_reply(&stream, b"");
        // Until the host gives up.
        let _ = stream.read(&mut [0]);
    });
    let mut client = place.connect();
    client.set_grace(Duration::from_millis(20));
    let request = Invocation::new("1", Duration::from_millis(1)).unwrap();
    let error = exchange_error(client.invoke(&request));
    assert!(matches!(error, ExchangeError::TimedOut { .. }), "{error:?}");
    let error = exchange_error(client.invoke(&request));
    assert!(matches!(error, ExchangeError::Undelivered), "{error:?}");
}

#[test]
fn an_unread_request_differs_from_one_that_was_read() {
    fn greet(mut stream: &UnixStream) {
        receive::<Request>(&mut stream, MAX_REQUEST_LENGTH).unwrap();
        write_frame(&mut stream, br#"{"hello":{"version":1}}"#, 100).unwrap();
    }
    type Delivered = bool;
    // Ended before the request, at its first byte, before its last, and after it.
    let cases: [(fn(UnixStream), Delivered); 4] = [
        (|stream| greet(&stream), false),
        (
            |mut stream| {
                greet(&stream);
                stream.read_exact(&mut [0]).unwrap();
            },
            false,
        ),
        (
            |mut stream| {
                greet(&stream);
                let mut length = [0; 4];
                stream.read_exact(&mut length).unwrap();
                let length = usize::try_from(u32::from_le_bytes(length)).unwrap();
                stream.read_exact(&mut vec![0; length - 1]).unwrap();
            },
            false,
        ),
        (|stream| greet_and_reply(&stream, b""), true),
    ];
    for (at, (guest, delivered)) in cases.into_iter().enumerate() {
        let place = Place::new();
        place.serve_once(b"OK 1\n", guest);
        let error = place.connect().invoke(&invocation(&json!(1))).unwrap_err();
        assert_eq!(error.is_undelivered(), !delivered, "{at}: {error:?}");
    }
}

#[test]
fn a_hostile_guest_gets_an_error_and_nothing_else() {
    type Expected = fn(&ExchangeError) -> bool;
    let cases: [(fn(UnixStream), Expected); 5] = [
        (
            |s| greet_and_reply(&s, &u32::MAX.to_le_bytes()),
            |e| matches!(e, ExchangeError::ReplyTooLong { .. }),
        ),
        (|s| greet_and_reply(&s, b"\x09\0\0\0{"), |e| matches!(e, ExchangeError::Closed)),
        (|s| greet_and_reply(&s, &frame("[1]")), |e| matches!(e, ExchangeError::Malformed(_))),
        (
            |s| greet_and_reply(&s, &frame(r#""identified""#)),
            |e| matches!(e, ExchangeError::Unexpected),
        ),
        (
            |s| {
                let other =
                    r#"{"answered":{"request_id":"other","answer":1,"duration_ns":1,"logs":""}}"#;
                greet_and_reply(&s, &frame(other));
            },
            |e| matches!(e, ExchangeError::Unexpected),
        ),
    ];
    for (guest, expected) in cases {
        let place = Place::new();
        place.serve_once(b"OK 1\n", guest);
        let error = exchange_error(place.connect().invoke(&invocation(&json!(1))));
        assert!(expected(&error), "{error:?}");
    }
}

#[test]
fn a_freeze_that_is_not_followed_by_the_end_of_the_connection_fails() {
    let place = Place::new();
    place.serve_once(b"OK 1\n", |stream| {
        let twice = [frame(r#""ready_to_freeze""#), frame(r#""ready_to_freeze""#)].concat();
        greet_and_reply(&stream, &twice);
    });
    let error = place.connect().prepare_freeze(LIMIT).unwrap_err();
    let unexpected = PrepareFreezeError::Exchange(ExchangeError::Unexpected);
    assert_eq!(format!("{error:?}"), format!("{unexpected:?}"));
}

/// A guest that sends these replies to a request.
fn replies(documents: &[Value]) -> Vec<u8> {
    documents.iter().flat_map(|document| frame(&document.to_string())).collect()
}

fn part(bytes: &[u8]) -> Value {
    serde_json::to_value(Reply::Part(Base64Bytes(bytes.to_vec()))).unwrap()
}

/// The last reply to `request`.
fn answered(request: &Invocation) -> Value {
    json!({ "answered": {
        "request_id": request.request_id(), "answer": null, "duration_ns": 5, "logs": "l",
    }})
}

/// What a client gets from a guest that sends `documents` to a request.
fn invoke_streaming(
    documents: impl FnOnce(&Invocation) -> Vec<Value>,
    sink: Option<&mut dyn AnswerSink>,
) -> Result<Answer, InvokeError> {
    let place = Place::new();
    let request = invocation(&json!(1));
    let reply = replies(&documents(&request));
    let listener = UnixListener::bind(place.socket()).unwrap();
    let guest = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        accept(&stream, b"OK 1\n");
        greet_and_reply(&stream, &reply);
    });
    let mut client = place.connect();
    let answer = match sink {
        Some(sink) => client.invoke_with(&request, sink),
        None => client.invoke(&request),
    };
    drop(client);
    // A guest that sends more than the client reads fails.
    let _ = guest.join();
    answer
}

#[derive(Default)]
struct Kept(Vec<String>);

impl AnswerSink for Kept {
    fn begin(&mut self, content_type: Option<String>) {
        self.0.push(content_type.unwrap());
    }

    fn part(&mut self, bytes: Vec<u8>, _deadline: Instant) {
        self.0.push(String::from_utf8(bytes).unwrap());
    }
}

#[test]
fn a_streamed_answer_goes_to_the_sink_in_parts() {
    let begun = json!({ "begun": { "content_type": "text/x" } });
    let mut sink = Kept::default();
    let documents = |request: &Invocation| vec![begun, part(b"a"), part(b"b"), answered(request)];
    let answer = invoke_streaming(documents, Some(&mut sink)).unwrap();
    assert_eq!(sink.0, ["text/x", "a", "b"]);
    assert_eq!((&*answer.payload, &*answer.logs), (&b"null"[..], "l"));
}

#[test]
fn a_streamed_answer_as_a_whole_need_not_be_json_and_has_a_limit() {
    let begun = json!({ "begun": { "content_type": null } });
    let long = vec![b'x'; MAX_PART_BYTES];
    let parts = MAX_ANSWER_BYTES / MAX_PART_BYTES;
    let rest = MAX_ANSWER_BYTES % MAX_PART_BYTES;
    for (last, fits) in [(rest, true), (rest + 1, false)] {
        let documents = |request: &Invocation| {
            let mut documents = vec![begun.clone()];
            documents.extend((0..parts).map(|_| part(&long)));
            documents.extend([part(&long[..last]), answered(request)]);
            documents
        };
        match invoke_streaming(documents, None) {
            Ok(answer) if fits => assert_eq!(answer.payload.len(), MAX_ANSWER_BYTES),
            Err(InvokeError::Function(failed)) if !fits => {
                assert_eq!(failed.error.error_type, "Function.ResponseSizeTooLarge");
                assert_eq!((&*failed.logs, failed.usage.unwrap().duration_ns), ("l", 5));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_stream_that_breaks_the_protocol_is_refused() {
    let begun = json!({ "begun": { "content_type": null } });
    let long = part(&vec![0; MAX_PART_BYTES + 1]);
    for documents in
        [vec![part(b"a")], vec![begun.clone(), begun.clone()], vec![begun.clone(), long]]
    {
        let error = exchange_error(invoke_streaming(|_| documents, None));
        assert!(matches!(error, ExchangeError::Unexpected), "{error:?}");
    }
    // The function has run, so the request must not go to another guest.
    let error = exchange_error(invoke_streaming(|_| vec![begun, part(b"a")], None));
    assert!(matches!(error, ExchangeError::Closed), "{error:?}");
}
