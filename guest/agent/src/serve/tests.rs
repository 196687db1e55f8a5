//! Tests of the server in an ordinary process, with a Unix socket instead of vsock and a recorder
//! instead of the machine. They need `python3` in `PATH`, as the guest does.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;

use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

use super::*;
use crate::protocol::{
    Answered, Base64Bytes, Failed, FunctionError, LOG_TAIL_BYTES, Load, Loaded, MAX_ANSWER_BYTES,
    MAX_EVENT_BYTES, MAX_FUNCTION_BYTES, MAX_FUNCTION_FILES, MAX_TIME_LIMIT_MS, NetworkAddresses,
    Pages, Refusal, RuntimeKind, write_frame,
};

const TIME_LIMIT_MS: u64 = 120_000;

/// Records the operations on the machine.
#[derive(Debug, Default, Clone)]
struct Recorder(Arc<Mutex<Vec<String>>>);

impl Recorder {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().push(what.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock())
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

    fn set_network(&self, addresses: &NetworkAddresses) -> io::Result<()> {
        self.note(format!("address {}/{}", addresses.address, addresses.prefix));
        Ok(())
    }

    fn set_metadata(&self, earlier: Option<Ipv4Addr>, address: Option<Ipv4Addr>) -> io::Result<()> {
        self.note(format!("metadata {address:?}, earlier {earlier:?}"));
        Ok(())
    }

    fn publish_generation(&self, generation: Uuid) -> io::Result<()> {
        self.note(format!("generation {}", generation.as_u128()));
        Ok(())
    }

    fn pages(&self) -> io::Result<Pages> {
        // More than a reply has.
        Ok(Pages { runs: vec![(0, 1); MAX_REPLY_LENGTH / 4], ..Pages::default() })
    }

    fn sync(&self) {
        self.note("sync");
    }

    fn settle(&self) {
        self.note("settle");
    }

    fn power_off(&self) -> io::Result<()> {
        self.note("power off");
        Ok(())
    }
}

/// A server with connections to it. It ends with its last connection.
pub(super) struct TestGuest {
    machine: Recorder,
    connect: mpsc::Sender<io::Result<UnixStream>>,
    folder: TempDir,
}

impl TestGuest {
    pub(super) fn start() -> Self {
        Self::with_freezer(None)
    }

    pub(super) fn with_freezer(freezer: Option<Freezer>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let machine = Recorder::default();
        let config = RuntimeConfig {
            python: PathBuf::from("python3"),
            task_dir: folder.path().join("task"),
            layers_dir: folder.path().join("layers"),
            runtime_dir: folder.path().join("runtime"),
            runtime_api: ([127, 0, 0, 1], 0).into(),
            user: None,
            counters: folder.path().join("vmstat"),
            min_ttl_ms: folder.path().join("min_ttl_ms"),
            freezer,
        };
        let server = Server::new(config, Box::new(machine.clone()));
        let (connect, incoming) = mpsc::channel();
        thread::spawn(move || server.serve(incoming));
        Self { machine, connect, folder }
    }

    /// What the guest reads for the kernel's counters.
    fn counters(&self) -> PathBuf {
        self.folder.path().join("vmstat")
    }

    fn open(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.connect.send(Ok(theirs)).unwrap();
        ours
    }

    pub(super) fn connect(&self) -> Host {
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

pub(super) struct Host(UnixStream);

impl Host {
    pub(super) fn ask(&mut self, request: &Request) -> Reply {
        send(&mut self.0, request, MAX_REQUEST_LENGTH).unwrap();
        receive(&mut self.0, MAX_REPLY_LENGTH).unwrap()
    }

    pub(super) fn load(&mut self, source: &str) -> Loaded {
        match self.ask(&Request::Load(load(source))) {
            Reply::Loaded(loaded) => loaded,
            other => panic!("the function does not load (is python3 in PATH?): {other:?}"),
        }
    }

    pub(super) fn identify(&mut self, generation: u128) {
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

    pub(super) fn answer(&mut self, event: &Value) -> Value {
        serde_json::from_str(self.answered(event).answer.get()).unwrap()
    }

    fn failed(&mut self, event: &Value) -> Failed {
        match self.ask_function(event) {
            Reply::Failed(failed) => failed,
            other => panic!("the function did not fail: {other:?}"),
        }
    }
}

/// A guest whose function runs until `finish` is called.
struct Running {
    guest: TestGuest,
    request: thread::JoinHandle<Value>,
    folder: TempDir,
}

impl Running {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (started, finish) = (folder.path().join("started"), folder.path().join("finish"));
        let (guest, mut host) = TestGuest::with(
            "import os, time\n\
             agent = os.getppid()\n\
             def handler(event, context):\n\
             \x20   open(event[0], 'w').close()\n\
             \x20   while not os.path.exists(event[1]) and os.getppid() == agent: time.sleep(0.001)\n\
             \x20   return 'finished'\n",
        );
        let event = json!([started, finish]);
        let request = thread::spawn(move || host.answer(&event));
        while !started.exists() {
            thread::yield_now();
        }
        Self { guest, request, folder }
    }

    fn finish(self) {
        std::fs::write(self.folder.path().join("finish"), "").unwrap();
        assert_eq!(self.request.join().unwrap(), json!("finished"));
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
        version: "$LATEST".into(),
        runtime: RuntimeKind::Own,
        snap_start: false,
        credentials: None,
    }
}

fn invoke(event: &Value, time_limit_ms: u64) -> Request {
    Request::Invoke(Invoke {
        request_id: "r-1".into(),
        event: to_raw_value(event).unwrap(),
        time_limit_ms,
        function_arn: None,
        client_context: None,
        trace_id: None,
        credentials: None,
        stream: false,
    })
}

fn identity(generation: u128) -> Identify {
    Identify {
        generation: Uuid::from_u128(generation),
        instance_id: format!("i-{generation}"),
        wall_clock_ns: 5,
        entropy: Base64Bytes(vec![7; 32]),
        credentials: None,
        network: None,
        metadata: None,
    }
}

fn refused(reply: Reply) -> Refusal {
    match reply {
        Reply::Refused(refusal) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

fn load_error(load: Load) -> FunctionError {
    let guest = TestGuest::start();
    match guest.connect().ask(&Request::Load(load)) {
        Reply::Failed(failed) => failed.error,
        other => panic!("the function loaded: {other:?}"),
    }
}

/// Kills the process with this id, which is a child of this process, and waits until it has ended.
fn kill_and_wait(id: &Value) {
    let id = i32::try_from(id.as_i64().unwrap()).unwrap();
    let process = rustix::process::Pid::from_raw(id).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    let options = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
    rustix::process::waitid(rustix::process::WaitId::Pid(process), options).unwrap();
}

const ECHO: &str = "def handler(event, context): return event";
const EXITS: &str = include_str!("../../../../tests/functions/exits/handler.py");
const IDENTITY: &str = include_str!("../../../../tests/functions/identity/handler.py");
const IMPORT_ERROR: &str = include_str!("../../../../tests/functions/import_error/handler.py");
const NEVER_RETURNS: &str = include_str!("../../../../tests/functions/never_returns/handler.py");
const RAISES: &str = include_str!("../../../../tests/functions/raises/handler.py");
const TEN_MEGABYTES: &str = include_str!("../../../../tests/functions/ten_megabytes/handler.py");
const UNSERIALISABLE: &str = include_str!("../../../../tests/functions/unserialisable/handler.py");

#[path = "lambda_tests.rs"]
mod lambda;

#[path = "answers_tests.rs"]
mod answers;

#[path = "failures_tests.rs"]
mod failures;

#[path = "gate_tests.rs"]
mod gate;

#[path = "requests_tests.rs"]
mod requests;

#[test]
fn instance_serves_callers_in_the_order_of_their_arrival() {
    let order = FairMutex::new(Vec::new());
    let first = order.lock();
    thread::scope(|scope| {
        let order = &order;
        for number in 0..8 {
            scope.spawn(move || order.lock().push(number));
            // The thread waits for the lock by then.
            thread::sleep(Duration::from_millis(50));
        }
        drop(first);
    });
    assert_eq!(*order.lock(), [0, 1, 2, 3, 4, 5, 6, 7]);
}
