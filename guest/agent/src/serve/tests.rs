//! The server as an ordinary process: a Unix socket in vsock's place, a recorder in the machine's.
//! They need `python3` in `PATH`, as the guest does.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc;

use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

use super::*;
use crate::protocol::{
    Answered, Base64Bytes, Failed, FunctionError, LOG_TAIL_BYTES, Load, Loaded, MAX_ANSWER_BYTES,
    Refusal,
};

const TIME_LIMIT_MS: u64 = 120_000;

/// Remembers what was done to it.
#[derive(Debug, Default, Clone)]
struct Recorder(Arc<Mutex<Vec<String>>>);

impl Recorder {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().unwrap().push(what.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Machine for Recorder {
    fn reseed(&self, entropy: &[u8]) -> io::Result<()> {
        self.note(format!("reseed {}", entropy.len()));
        Ok(())
    }

    fn set_clock(&self, wall_clock_ns: u64) -> io::Result<()> {
        if wall_clock_ns == 0 {
            return Err(io::Error::other("no such time"));
        }
        self.note(format!("clock {wall_clock_ns}"));
        Ok(())
    }

    fn set_host_name(&self, name: &str) -> io::Result<()> {
        self.note(format!("host name {name}"));
        Ok(())
    }

    fn sync(&self) {
        self.note("sync");
    }

    fn power_off(&self) -> io::Result<()> {
        self.note("power off");
        Ok(())
    }
}

/// A server, and connections to it. Ends with its last connection.
struct Guest {
    machine: Recorder,
    connect: mpsc::Sender<io::Result<UnixStream>>,
    _task_dir: TempDir,
}

impl Guest {
    fn start() -> Self {
        let task_dir = tempfile::tempdir().unwrap();
        let machine = Recorder::default();
        let config = RuntimeConfig {
            python: PathBuf::from("python3"),
            task_dir: task_dir.path().join("task"),
            user: None,
        };
        let server = Arc::new(Server::new(config, Box::new(machine.clone())));
        let (connect, incoming) = mpsc::channel();
        thread::spawn(move || server.serve(incoming));
        Self { machine, connect, _task_dir: task_dir }
    }

    fn open(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.connect.send(Ok(theirs)).unwrap();
        ours
    }

    fn connect(&self) -> Host {
        let mut host = Host(self.open());
        let reply = host.ask(&Request::Hello { oldest: 1, newest: 1 });
        assert!(matches!(reply, Reply::Hello { version: 1 }), "{reply:?}");
        host
    }

    /// A guest with `source` loaded and the gate open.
    fn with(source: &str) -> (Self, Host) {
        let guest = Self::start();
        let mut host = guest.connect();
        host.load(source);
        host.identify(1);
        (guest, host)
    }
}

struct Host(UnixStream);

impl Host {
    fn ask(&mut self, request: &Request) -> Reply {
        send(&mut self.0, request, MAX_REQUEST_LENGTH).unwrap();
        receive(&mut self.0, MAX_REPLY_LENGTH).unwrap()
    }

    fn load(&mut self, source: &str) -> Loaded {
        match self.ask(&Request::Load(load(source))) {
            Reply::Loaded(loaded) => loaded,
            other => panic!("the function does not load (is python3 in PATH?): {other:?}"),
        }
    }

    fn identify(&mut self, generation: u128) {
        let reply = self.ask(&Request::Identify(identity(generation)));
        assert!(matches!(reply, Reply::Identified), "{reply:?}");
    }

    fn ask_function(&mut self, event: &Value) -> Reply {
        self.ask(&invoke(event, TIME_LIMIT_MS))
    }

    fn answered(&mut self, event: &Value) -> Answered {
        match self.ask_function(event) {
            Reply::Answered(answered) => answered,
            other => panic!("the function did not answer: {other:?}"),
        }
    }

    fn answer(&mut self, event: &Value) -> Value {
        serde_json::from_str(self.answered(event).answer.get()).unwrap()
    }

    fn failed(&mut self, event: &Value) -> Failed {
        match self.ask_function(event) {
            Reply::Failed(failed) => failed,
            other => panic!("the function did not fail: {other:?}"),
        }
    }
}

fn load(source: &str) -> Load {
    let files = BTreeMap::from([("handler.py".to_owned(), Base64Bytes(source.into()))]);
    Load {
        name: "test".into(),
        handler: "handler.handler".into(),
        files,
        environment: BTreeMap::new(),
        memory_mib: 256,
        time_limit_ms: TIME_LIMIT_MS,
    }
}

fn invoke(event: &Value, time_limit_ms: u64) -> Request {
    Request::Invoke(Invoke {
        request_id: "r-1".into(),
        event: to_raw_value(event).unwrap(),
        time_limit_ms,
    })
}

fn identity(generation: u128) -> Identify {
    Identify {
        generation: Uuid::from_u128(generation),
        instance_id: format!("i-{generation}"),
        wall_clock_ns: 5,
        entropy: Base64Bytes(vec![7; 32]),
    }
}

fn refused(reply: Reply) -> Refusal {
    match reply {
        Reply::Refused(refusal) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

fn load_error(load: Load) -> FunctionError {
    let guest = Guest::start();
    match guest.connect().ask(&Request::Load(load)) {
        Reply::Failed(failed) => failed.error,
        other => panic!("the function loaded: {other:?}"),
    }
}

const ECHO: &str = "def handler(event, context): return event";

#[test]
fn a_function_answers_what_it_is_asked() {
    let (_guest, mut host) = Guest::with(ECHO);
    for event in
        [json!(null), json!({"a": [1, 2.5, "ü\u{1F600}", true]}), json!("x".repeat(300_000))]
    {
        assert_eq!(host.answer(&event), event);
    }
}

#[test]
fn output_is_returned_and_cannot_break_the_channel() {
    let (_guest, mut host) = Guest::with(
        "import os, sys\n\
         def handler(event, context):\n\
         \x20   print('to stdout'); print('to stderr', file=sys.stderr)\n\
         \x20   os.write(1, b'\\xff\\x00\\x00\\x7f{}')\n\
         \x20   return sys.stdin.read()\n",
    );
    let answered = host.answered(&json!(1));
    assert_eq!(answered.answer.get(), "\"\"");
    assert_eq!(answered.logs, "to stdout\nto stderr\n\u{FFFD}\0\0\u{7f}{}");
    assert_eq!(host.answered(&json!(1)).logs, answered.logs, "logs of one request only");
}

#[test]
fn more_output_than_a_pipe_holds_leaves_its_tail() {
    let (_guest, mut host) = Guest::with(
        "def handler(event, context):\n\
         \x20   for i in range(20000): print('line', i)\n",
    );
    let logs = host.answered(&json!(1)).logs;
    assert_eq!(logs.len(), LOG_TAIL_BYTES);
    assert!(logs.ends_with("line 19998\nline 19999\n"), "{logs}");
}

#[test]
fn an_exception_is_returned_with_type_message_and_trace() {
    let (_guest, mut host) = Guest::with(
        "def inner(): return {}['missing']\n\
         def handler(event, context): return inner()\n",
    );
    let error = host.failed(&json!(1)).error;
    assert_eq!(
        (error.error_type.as_str(), error.error_message.as_str()),
        ("KeyError", "'missing'")
    );
    assert_eq!(error.stack_trace.len(), 2, "{error:?}");
    assert!(error.stack_trace[0].contains("handler.py\", line 2, in handler\n"), "{error:?}");
    assert!(error.stack_trace[1].contains("line 1, in inner\n"), "{error:?}");
}
