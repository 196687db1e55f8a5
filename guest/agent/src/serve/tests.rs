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

mod answers {
    use super::*;

    #[test]
    fn function_answers_events() {
        let (_guest, mut host) = TestGuest::with(ECHO);
        let long = json!("x".repeat(300_000));
        for event in [json!(null), json!({"a": [1, 2.5, "ü\u{1F600}", true]}), long] {
            assert_eq!(host.answer(&event), event);
        }
    }

    #[test]
    fn function_gets_context_and_environment() {
        let guest = TestGuest::start();
        let mut host = guest.connect();
        let mut load = load(
            "import os, handler as itself, part.inner\n\
             def handler(event, context):\n\
             \x20   left = context.get_remaining_time_in_millis()\n\
             \x20   return [context.aws_request_id, context.function_name, context.function_version,\n\
             \x20           context.memory_limit_in_mb, context.log_group_name, context.log_stream_name,\n\
             \x20           0 < left <= 120000, os.environ['COLOUR'], part.inner.VALUE,\n\
             \x20           os.getcwd() == os.environ['LAMBDA_TASK_ROOT'], 'CARGO_PKG_NAME' in os.environ]\n",
        );
        load.files.insert("part/inner.py".into(), Base64Bytes(b"VALUE = 'inner'".to_vec()));
        load.environment.insert("COLOUR".into(), "blue".into());
        assert!(matches!(host.ask(&Request::Load(load)), Reply::Loaded(_)));
        host.identify(1);
        let seen = host.answer(&json!(null));
        let log_stream = seen[5].as_str().unwrap();
        assert!(log_stream.ends_with("/[$LATEST]00000000000000000000000000000001"), "{log_stream}");
        let expected = json!([
            "r-1",
            "test",
            "$LATEST",
            "256",
            "/aws/lambda/test",
            log_stream,
            true,
            "blue",
            "inner",
            true,
            false
        ]);
        assert_eq!(seen, expected);
    }

    #[test]
    fn output_is_returned_and_does_not_affect_the_channel() {
        let (_guest, mut host) = TestGuest::with(
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
    fn long_output_is_truncated_to_its_tail() {
        let (_guest, mut host) = TestGuest::with(
            "def handler(event, context):\n\
             \x20   for i in range(20000): print('line', i)\n",
        );
        let logs = host.answered(&json!(1)).logs;
        assert_eq!(logs.len(), LOG_TAIL_BYTES);
        assert!(logs.ends_with("line 19998\nline 19999\n"), "{logs}");
    }

    #[test]
    fn function_may_close_its_output() {
        let (_guest, mut host) = TestGuest::with(
            "import os\n\
             def handler(event, context):\n\
             \x20   os.close(1); os.close(2)\n\
             \x20   return 'still here'\n",
        );
        assert_eq!(host.answer(&json!(1)), json!("still here"));
    }

    #[test]
    fn second_function_replaces_the_first() {
        let (_guest, mut host) = TestGuest::with(ECHO);
        let mut second = load("import os\ndef handler(event, context): return os.listdir()");
        second.files.insert("only.txt".into(), Base64Bytes::default());
        assert!(matches!(host.ask(&Request::Load(second)), Reply::Loaded(_)));
        let mut names: Vec<String> = serde_json::from_value(host.answer(&json!(1))).unwrap();
        names.retain(|name| name != "__pycache__");
        names.sort();
        assert_eq!(names, ["handler.py", "only.txt"]);
    }
}

mod failures {
    use super::*;

    #[test]
    fn exception_is_returned_with_type_message_and_trace() {
        let (_guest, mut host) = TestGuest::with(RAISES);
        let error = host.failed(&json!(1)).error;
        assert_eq!(error.error_type, "KeyError");
        assert_eq!(error.error_message, "'missing'");
        let mut frames = error.frames.unwrap();
        let frames = frames.lines();
        assert_eq!(frames.len(), 2, "{frames:?}");
        assert!(frames[0].contains("handler.py\", line 6, in handler\n"), "{frames:?}");
        assert!(frames[1].contains("line 2, in inner\n"), "{frames:?}");
    }

    #[test]
    fn unprintable_and_endless_exceptions_are_returned() {
        let (_guest, mut host) = TestGuest::with(
            "class Mute(Exception):\n\
             \x20   def __str__(self): raise ValueError\n\
             def deep(n): return deeper(n)\n\
             def deeper(n): return deep(n)\n\
             def handler(event, context):\n\
             \x20   if event == 'mute': raise Mute\n\
             \x20   if event == 'deep': deep(0)\n\
             \x20   raise ValueError(event * 10_000_000 + '\\ud800')\n",
        );
        let mut error = |event: &str| host.failed(&json!(event)).error;
        assert_eq!(error("mute").error_message, "<the exception has no printable text>");
        let deep = error("deep");
        assert_eq!(deep.error_type, "RecursionError");
        assert_eq!(deep.frames.unwrap().lines().len(), 64);
        assert_eq!(error("x").error_message, "x".repeat(16384));
        assert_eq!(error("").error_message, "?");
    }

    #[test]
    fn import_errors_are_returned() {
        let error = load_error(load(IMPORT_ERROR));
        assert_eq!(error.error_type, "Runtime.ImportModuleError");
        let text = "Unable to import module 'handler': No module named 'no_such_module'";
        assert_eq!(error.error_message, text);

        let error = load_error(load("def handler(:"));
        assert_eq!(error.error_type, "Runtime.UserCodeSyntaxError");
        assert!(error.error_message.contains("handler.py, line 1"), "{error:?}");

        let error = load_error(load("x = 1 / 0"));
        assert_eq!(error.error_type, "ZeroDivisionError");
        assert_eq!(error.frames.unwrap().lines().len(), 1);

        let error = load_error(load("handler = 3"));
        assert_eq!(error.error_type, "Runtime.HandlerNotFound");
        assert_eq!(error.error_message, "Handler 'handler' missing on module 'handler'");

        let error = load_error(Load { handler: "handler".into(), ..load(ECHO) });
        assert_eq!(error.error_type, "Runtime.MalformedHandlerName");

        let error = load_error(load("import sys; sys.exit(9)"));
        assert_eq!(error.error_type, "Runtime.ExitError");
        assert_eq!(error.error_message, "Runtime exited with error: exit status: 9");

        let error = load_error(Load { time_limit_ms: 500, ..load("import time; time.sleep(60)") });
        assert_eq!(error.error_type, "Sandbox.Timedout");
        assert_eq!(error.error_message, "Init timed out after 0.50 seconds");
    }

    #[test]
    fn failed_load_leaves_no_function() {
        let guest = TestGuest::start();
        let mut host = guest.connect();
        host.load(ECHO);
        assert!(matches!(host.ask(&Request::Load(load(IMPORT_ERROR))), Reply::Failed(_)));
        host.identify(1);
        assert_eq!(refused(host.ask_function(&json!(1))).kind, RefusalKind::NotLoaded);
    }

    #[test]
    fn answers_without_a_json_form_are_errors() {
        let (_guest, mut host) = TestGuest::with(UNSERIALISABLE);
        for event in ["set", "bytes", "nan", "infinity", "loop", "nested", "key"] {
            let error = host.failed(&json!(event)).error;
            assert_eq!(error.error_type, "Runtime.MarshalError", "{event}: {error:?}");
            assert!(error.error_message.starts_with("Unable to marshal response: "), "{error:?}");
        }
    }

    #[test]
    fn answer_length_is_limited() {
        let (_guest, mut host) = TestGuest::with(TEN_MEGABYTES);
        let answered = host.answered(&json!(MAX_ANSWER_BYTES));
        assert_eq!(answered.answer.get().len(), MAX_ANSWER_BYTES);
        let error = host.failed(&json!(10_000_000)).error;
        assert_eq!(error.error_type, "Function.ResponseSizeTooLarge");
        assert!(error.error_message.contains("(10000000 bytes)"), "{error:?}");
        assert!(error.error_message.contains("(6291556 bytes)"), "{error:?}");
    }

    #[test]
    fn unreadable_event_fails_only_its_request() {
        let (_guest, mut host) = TestGuest::with("def handler(event, context): return 1");
        let deep = "[".repeat(200_000) + &"]".repeat(200_000);
        let deep = Request::Invoke(Invoke {
            request_id: "r-1".into(),
            event: serde_json::value::RawValue::from_string(deep).unwrap(),
            time_limit_ms: TIME_LIMIT_MS,
            function_arn: None,
            client_context: None,
            trace_id: None,
            credentials: None,
            stream: false,
        });
        match host.ask(&deep) {
            Reply::Failed(failed) => assert_eq!(failed.error.error_type, "Runtime.UnmarshalError"),
            other => panic!("{other:?}"),
        }
        assert_eq!(host.answer(&json!(1)), json!(1));
    }

    #[test]
    fn function_that_exceeds_its_time_limit_is_killed_and_restarted() {
        let (_guest, mut host) = TestGuest::with(NEVER_RETURNS);
        match host.ask(&invoke(&json!({"return": false}), 2_000)) {
            Reply::Failed(failed) => {
                assert_eq!(failed.error.error_type, "Sandbox.Timedout");
                let text = "RequestId: r-1 Error: Task timed out after 2.00 seconds";
                assert_eq!(failed.error.error_message, text);
                assert_eq!(&*failed.logs, "waiting\n");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(host.answer(&json!({"return": true})), json!("returned"));
    }

    #[test]
    fn the_largest_memory_so_far_and_the_time_of_a_failure_are_returned() {
        const LARGE: u64 = 64 << 20;
        const SOURCE: &str = "import os, time\n\
             def handler(event, context):\n\
             \x20   large = bytearray(os.urandom(1)) * (64 << 20) if event else b''\n\
             \x20   if event == 'exit': os._exit(1)\n\
             \x20   time.sleep(60 if event == 'sleep' else 0)\n\
             \x20   return event['x']\n";
        let usage = |reply| match reply {
            Reply::Failed(Failed { usage: Some(usage), .. }) => *usage,
            other => panic!("{other:?}"),
        };
        let (_guest, mut host) = TestGuest::with(SOURCE);
        let before = usage(host.ask_function(&json!({})));
        assert!(before.duration_ns > 0 && before.max_memory_bytes > 1 << 20, "{before:?}");
        let memory = host.answered(&json!({"x": 1})).max_memory_bytes;
        assert!(memory > before.max_memory_bytes.max(LARGE), "{memory}, {before:?}");
        let later = usage(host.ask_function(&json!({})));
        assert_eq!(later.max_memory_bytes, memory);
        for end in ["exit", "sleep"] {
            let (_guest, mut host) = TestGuest::with(SOURCE);
            let ended = usage(host.ask(&invoke(&json!(end), 2_000)));
            assert!(ended.max_memory_bytes > LARGE, "{end}: {ended:?}");
        }
    }

    #[test]
    fn children_of_a_killed_function_are_killed() {
        let (_guest, mut host) = TestGuest::with(
            "import subprocess, time\n\
             def handler(event, context):\n\
             \x20   print(subprocess.Popen(['sleep', '60']).pid)\n\
             \x20   time.sleep(60)\n",
        );
        let Reply::Failed(failed) = host.ask(&invoke(&json!(1), 2_000)) else {
            panic!("the function returned")
        };
        let child: u32 = failed.logs.trim().parse().unwrap();
        // An unreaped orphan stays a zombie.
        let lives = || {
            std::fs::read_to_string(format!("/proc/{child}/stat"))
                .is_ok_and(|stat| !stat.contains(") Z "))
        };
        while lives() {
            thread::yield_now();
        }
    }

    #[test]
    fn runtime_that_the_kernel_kills_for_lack_of_memory_has_its_own_error() {
        let (guest, mut host) = TestGuest::with(
            "import os\n\
             def handler(event, context):\n\
             \x20   if event: open(event, 'w').write('oom_kill_else 7\\noom_kill 1\\nlast 2\\n')\n\
             \x20   os.kill(os.getpid(), 9)\n",
        );
        let counters = json!(guest.counters());
        for (event, kind) in [
            (json!(null), "Runtime.ExitError"),
            (counters.clone(), "Runtime.OutOfMemory"),
            // The counter is the one of the earlier kill.
            (counters, "Runtime.ExitError"),
        ] {
            let error = host.failed(&event).error;
            assert_eq!(error.error_type, kind, "{error:?}");
            assert!(error.error_message.contains("SIGKILL"), "{error:?}");
        }
    }

    #[test]
    fn runtime_that_was_killed_between_requests_is_replaced() {
        let (_guest, mut host) =
            TestGuest::with("import os\ndef handler(event, context): return os.getpid()");
        let killed = host.answer(&json!(null));
        kill_and_wait(&killed);
        assert_ne!(host.answer(&json!(null)), killed);
    }

    #[test]
    fn runtime_that_exits_is_an_error_and_restarted() {
        let (_guest, mut host) = TestGuest::with(EXITS);
        for (event, text) in [
            ("sys.exit", "Runtime exited with error: exit status: 3"),
            ("os._exit", "Runtime exited with error: exit status: 4"),
            ("success", "Runtime exited without providing a reason"),
            ("segfault", "Runtime exited with error: signal: 11 (SIGSEGV)"),
            ("closes", "Runtime closed its channel and was killed"),
        ] {
            let failed = host.failed(&json!(event));
            assert_eq!(failed.error.error_type, "Runtime.ExitError");
            let message = failed.error.error_message.strip_suffix(" (core dumped)");
            let message = message.unwrap_or(&failed.error.error_message);
            assert_eq!(message, format!("RequestId: r-1 Error: {text}"));
            assert_eq!(&*failed.logs, "last words\n", "{event}");
        }
        assert_eq!(host.answer(&json!("stays")), json!("still here"));
    }

    #[test]
    fn function_that_writes_to_the_channel_is_killed() {
        let (_guest, mut host) = TestGuest::with(
            "import os, stat, struct, time\n\
             def handler(event, context):\n\
             \x20   if event is None: return 'fine'\n\
             \x20   for fd in range(3, 64):\n\
             \x20       try: found = stat.S_ISSOCK(os.fstat(fd).st_mode)\n\
             \x20       except OSError: continue\n\
             \x20       if found: os.write(fd, bytes(event))\n\
             \x20   time.sleep(60)\n",
        );
        let frame = |payload: &[u8]| {
            let length = u32::try_from(payload.len()).unwrap().to_le_bytes();
            [&length[..], payload].concat()
        };
        for bytes in [
            vec![255; 4],
            frame(b"no JSON"),
            frame(b"{\"done\":null}"),
            frame(b"{\"answer\":[}"),
            frame(b"{\"answer\":1,\"answer\":2}"),
        ] {
            let error = host.failed(&json!(bytes)).error;
            assert_eq!(error.error_type, "Runtime.ExitError", "{bytes:?}");
            assert!(error.error_message.contains("wrote an invalid message"), "{error:?}");
            assert_eq!(host.answer(&json!(null)), json!("fine"));
        }
    }
}

mod gate {
    use super::*;

    fn ready_to_freeze(reply: &Reply) {
        assert!(matches!(reply, Reply::ReadyToFreeze), "{reply:?}");
    }

    #[test]
    fn requests_are_refused_before_an_identity() {
        let guest = TestGuest::start();
        let mut host = guest.connect();
        host.load(ECHO);
        assert_eq!(refused(host.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);
        host.identify(1);
        assert_eq!(host.answer(&json!(1)), json!(1));
    }

    #[test]
    fn freeze_closes_the_gate_until_a_new_identity() {
        let (guest, mut host) = TestGuest::with(ECHO);
        guest.machine.take();
        ready_to_freeze(&host.ask(&Request::PrepareFreeze));
        assert_eq!(guest.machine.take(), ["sync", "settle"]);
        let end = receive::<Reply>(&mut host.0, MAX_REPLY_LENGTH);
        assert!(end.is_err(), "the connection goes on after the reply: {end:?}");

        let mut host = guest.connect();
        assert_eq!(refused(host.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);
        assert_eq!(refused(host.ask(&Request::Load(load(ECHO)))).kind, RefusalKind::Frozen);
        let same = host.ask(&Request::Identify(identity(1)));
        assert_eq!(refused(same).kind, RefusalKind::Frozen, "the generation before the freeze");
        assert_eq!(refused(host.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);

        host.identify(2);
        assert_eq!(guest.machine.take(), ["reseed 32", "clock 5", "host name i-2", "generation 2"]);
        assert_eq!(host.answer(&json!(1)), json!(1));

        let address = "10.0.0.2".parse().unwrap();
        let network =
            NetworkAddresses { address, prefix: 24, gateway: None, dns: None, ipv6: None };
        let identify = Identify { network: Some(network), ..identity(3) };
        assert!(matches!(host.ask(&Request::Identify(identify)), Reply::Identified));
        let done = guest.machine.take();
        assert_eq!(done[3..], ["address 10.0.0.2/24", "generation 3"]);

        // The address of a metadata service, the same again, and none.
        for (generation, metadata, expected) in [
            (4, Some(Ipv4Addr::LOCALHOST), "metadata Some(127.0.0.1), earlier None"),
            (5, Some(Ipv4Addr::LOCALHOST), "metadata Some(127.0.0.1), earlier Some(127.0.0.1)"),
            (6, None, "metadata None, earlier Some(127.0.0.1)"),
        ] {
            let identify = Identify { metadata, ..identity(generation) };
            assert!(matches!(host.ask(&Request::Identify(identify)), Reply::Identified));
            assert_eq!(guest.machine.take()[3], expected);
        }
        host.identify(7);
        assert_eq!(guest.machine.take()[3], "generation 7");
    }

    #[test]
    fn refused_identity_leaves_the_gate_closed() {
        let (guest, mut host) = TestGuest::with(ECHO);
        let attempts = [
            (
                Identify { entropy: Base64Bytes(vec![7; 31]), ..identity(2) },
                RefusalKind::BadRequest,
            ),
            (
                Identify { entropy: Base64Bytes(vec![7; 513]), ..identity(2) },
                RefusalKind::BadRequest,
            ),
            (Identify { instance_id: "Big-Name".into(), ..identity(2) }, RefusalKind::BadRequest),
            (Identify { instance_id: "-".into(), ..identity(2) }, RefusalKind::BadRequest),
            (Identify { wall_clock_ns: 0, ..identity(2) }, RefusalKind::System),
        ];
        ready_to_freeze(&host.ask(&Request::PrepareFreeze));
        let mut host = guest.connect();
        for (attempt, kind) in attempts {
            assert_eq!(refused(host.ask(&Request::Identify(attempt))).kind, kind);
            assert_eq!(refused(host.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);
        }
        host.identify(2);
        assert_eq!(host.answer(&json!(1)), json!(1));
    }

    #[test]
    fn freeze_waits_for_requests_in_flight_and_refuses_others() {
        let running = Running::start();
        let mut second = running.guest.connect();
        let mut third = running.guest.connect();
        let freeze = thread::spawn(move || second.ask(&Request::PrepareFreeze));
        let status = |host: &mut Host| match host.ask(&Request::Status) {
            Reply::Status(status) => status,
            other => panic!("{other:?}"),
        };
        while status(&mut third).open {
            thread::yield_now();
        }
        assert_eq!(refused(third.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);
        assert!(!freeze.is_finished());
        running.finish();
        ready_to_freeze(&freeze.join().unwrap());
        let expected = Status {
            agent: env!("CARGO_PKG_VERSION").into(),
            function: Some("test".into()),
            handler: Some("handler.handler".into()),
            open: false,
            instance_id: Some("i-1".into()),
            invocations: 1,
        };
        assert_eq!(status(&mut third), expected);
    }

    #[test]
    fn freeze_restarts_a_runtime_that_had_exited() {
        let (guest, mut host) = TestGuest::with(
            "import os\n\
             born = os.getpid()\n\
             def handler(event, context): os._exit(1) if event else None\n",
        );
        host.failed(&json!(1));
        ready_to_freeze(&host.ask(&Request::PrepareFreeze));
        assert_eq!(guest.connect().identify(2), ());
    }

    /// Without reseeding, all compared values would be equal in every clone.
    #[test]
    fn identity_replaces_the_random_state_of_the_running_process() {
        let guest = TestGuest::start();
        let mut host = guest.connect();
        host.load(
            "import os, random, ssl, tempfile, uuid\n\
             random.seed(7)\n\
             node, names = uuid.getnode(), tempfile._get_candidate_names()\n\
             uuid.uuid1()\n\
             def handler(event, context):\n\
             \x20   return {\n\
             \x20       'pid': os.getpid(),\n\
             \x20       'random': random.random() == random.Random(7).random(),\n\
             \x20       'gauss': random.gauss(0, 1) == random.Random(7).gauss(0, 1),\n\
             \x20       'node': uuid.uuid1().node == node or uuid.getnode() == node,\n\
             \x20       'multicast': uuid.uuid1().node >> 40 & 1,\n\
             \x20       'names': tempfile._get_candidate_names() is names,\n\
             \x20       'instance': os.environ['FIRN_INSTANCE_ID'],\n\
             \x20   }\n",
        );
        host.identify(1);
        let before = host.answer(&json!(1));
        ready_to_freeze(&host.ask(&Request::PrepareFreeze));
        let mut host = guest.connect();
        host.identify(2);
        let after = host.answer(&json!(1));
        let expected = |instance: &str| {
            json!({
                "pid": before["pid"], "random": false, "gauss": false, "node": false,
                "multicast": 1, "names": false, "instance": instance,
            })
        };
        assert_eq!(before, expected("i-1"));
        assert_eq!(after, expected("i-2"), "the same process with another identity");
    }

    #[test]
    fn runtime_that_cannot_get_its_identity_is_replaced() {
        let (guest, mut host) = TestGuest::with(
            "import os\n\
             def handler(event, context):\n\
             \x20   if event: os.environ = None\n\
             \x20   return [os.getpid(), os.environ is None]\n",
        );
        let before = host.answer(&json!(true));
        ready_to_freeze(&host.ask(&Request::PrepareFreeze));
        let mut host = guest.connect();
        host.identify(2);
        let after = host.answer(&json!(false));
        assert_ne!(before[0], after[0]);
        assert_eq!(after[1], json!(false));
    }

    #[test]
    fn runtime_that_does_not_reseed_in_time_fails_the_clone() {
        let (guest, mut host) = TestGuest::with(
            "import random, time\n\
             class Slow(random.Random):\n\
             \x20   sets = -9\n\
             \x20   def __setattr__(self, name, value):\n\
             \x20       self.__dict__['sets'] = self.sets + 1\n\
             \x20       if self.sets == 2: time.sleep(1000)\n\
             random._inst = Slow()\n\
             random._inst.__dict__['sets'] = 0\n\
             def handler(event, context): return 1\n",
        );
        ready_to_freeze(&host.ask(&Request::PrepareFreeze));
        let mut host = guest.connect();
        match host.ask(&Request::Identify(identity(2))) {
            Reply::Failed(failed) => assert_eq!(failed.error.error_type, "Sandbox.Timedout"),
            other => panic!("{other:?}"),
        }
        let refusal = refused(host.ask_function(&json!(1)));
        assert_eq!(refusal.kind, RefusalKind::NotIdentified);
    }

    #[test]
    fn identity_function_returns_the_identity() {
        let (_guest, mut host) = TestGuest::with(IDENTITY);
        let (one, other) = (host.answer(&json!(1)), host.answer(&json!(1)));
        assert_eq!(one["instance_id"], json!("i-1"));
        for random in ["urandom", "random", "uuid1", "uuid4", "temporary"] {
            assert_ne!(one[random], other[random], "{random}");
        }
    }
}

mod requests {
    use super::*;

    fn reply_to(request: &Request) -> (Refusal, bool) {
        let guest = TestGuest::start();
        let mut host = Host(guest.open());
        let refusal = refused(host.ask(request));
        let closed = receive::<Reply>(&mut host.0, MAX_REPLY_LENGTH).is_err();
        (refusal, closed)
    }

    #[test]
    fn connection_must_start_with_hello() {
        let (refusal, closed) = reply_to(&Request::Status);
        assert_eq!((refusal.kind, closed), (RefusalKind::Version, true));
    }

    #[test]
    fn host_without_a_common_version_is_refused() {
        let (refusal, closed) = reply_to(&Request::Hello { oldest: NEWEST_VERSION + 1, newest: 9 });
        assert_eq!((refusal.kind, closed), (RefusalKind::Version, true));
        let versions = format!("{} to 9", NEWEST_VERSION + 1);
        assert!(refusal.message.contains(&versions), "{}", refusal.message);
        assert_eq!(hello(0, 9).1, Next::Continue, "the newest common version");
    }

    #[test]
    fn a_reply_that_is_too_long_is_refused() {
        let guest = TestGuest::start();
        let mut host = guest.connect();
        let refusal = refused(host.ask(&Request::Pages));
        assert_eq!(refusal.kind, RefusalKind::System);
        assert!(refusal.message.contains("exceeds the limit"), "{}", refusal.message);
        assert!(matches!(host.ask(&Request::Status), Reply::Status(_)));
    }

    #[test]
    fn invalid_request_ends_the_connection() {
        let guest = TestGuest::start();
        let mut host = guest.connect();
        write_frame(&mut host.0, b"{\"no_such_request\":1}", MAX_REQUEST_LENGTH).unwrap();
        let reply = receive(&mut host.0, MAX_REPLY_LENGTH).unwrap();
        assert_eq!(refused(reply).kind, RefusalKind::BadRequest);
        assert!(receive::<Reply>(&mut host.0, MAX_REPLY_LENGTH).is_err());

        let mut host = guest.connect();
        host.0.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(receive::<Reply>(&mut host.0, MAX_REPLY_LENGTH).is_err());
        guest.connect();
    }

    #[test]
    fn event_over_the_limit_is_refused() {
        let (_guest, mut host) = TestGuest::with(ECHO);
        let refusal = refused(host.ask_function(&json!("x".repeat(MAX_EVENT_BYTES))));
        assert_eq!(refusal.kind, RefusalKind::BadRequest);
        for time_limit_ms in [0, MAX_TIME_LIMIT_MS + 1] {
            let refusal = refused(host.ask(&invoke(&json!(1), time_limit_ms)));
            assert_eq!(refusal.kind, RefusalKind::BadRequest);
        }
        assert_eq!(host.answer(&json!(1)), json!(1));
    }

    #[test]
    fn files_stay_inside_the_functions_directory() {
        let with_path = |path: &str| {
            let mut load = load(ECHO);
            load.files.insert(path.into(), Base64Bytes::default());
            function::check(&load)
        };
        assert_eq!(with_path("a/b.py"), Ok(()));
        let long = "x".repeat(256);
        for path in ["", "/etc/passwd", "../x", "a/../x", "a/./x", "a//x", "a/", ".", "a\0b", &long]
        {
            assert!(with_path(path).is_err(), "{path:?}");
        }
    }

    #[test]
    fn function_that_exceeds_a_limit_is_refused() {
        let refusals = [
            Load { name: String::new(), ..load(ECHO) },
            Load { name: "a b".into(), ..load(ECHO) },
            Load { name: "x".repeat(65), ..load(ECHO) },
            Load { time_limit_ms: 0, ..load(ECHO) },
            Load { environment: BTreeMap::from([("A=B".into(), String::new())]), ..load(ECHO) },
            Load { environment: BTreeMap::from([("A".into(), "\0".into())]), ..load(ECHO) },
            Load {
                files: BTreeMap::from([("x".into(), Base64Bytes(vec![0; MAX_FUNCTION_BYTES + 1]))]),
                ..load(ECHO)
            },
            Load {
                files: (0..=MAX_FUNCTION_FILES)
                    .map(|n| (n.to_string(), Base64Bytes::default()))
                    .collect(),
                ..load(ECHO)
            },
        ];
        for load in refusals {
            assert!(function::check(&load).is_err(), "{} {:?}", load.name, load.environment);
        }
        assert_eq!(function::check(&load(ECHO)), Ok(()));
    }

    #[test]
    fn function_that_cannot_be_written_is_refused() {
        let guest = TestGuest::start();
        let mut host = guest.connect();
        let mut load = load(ECHO);
        load.files.insert("handler.py/below.py".into(), Base64Bytes::default());
        let refusal = refused(host.ask(&Request::Load(load)));
        assert_eq!(refusal.kind, RefusalKind::System);
        assert!(refusal.message.contains("handler.py/below.py"), "{}", refusal.message);
    }

    #[test]
    fn machine_powers_off_while_the_function_runs() {
        let running = Running::start();
        let mut other = running.guest.connect();
        running.guest.machine.take();
        assert!(matches!(other.ask(&Request::Shutdown), Reply::ShuttingDown));
        assert!(receive::<Reply>(&mut other.0, MAX_REPLY_LENGTH).is_err());
        assert_eq!(running.guest.machine.take(), ["sync", "power off"]);
        running.finish();
    }
}

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
