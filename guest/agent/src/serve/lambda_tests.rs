//! Functions that use the Runtime API. The runtime is a small `bootstrap` in Python, which calls
//! the API as `awslambdaric` does. The tests with microVMs run `awslambdaric` itself.

#[path = "lambda_stream_tests.rs"]
mod streams;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::protocol::{Frames, Put, RoleCredentials, RuntimeKind};

/// Fetches requests and answers as `HANDLE` defines, after the calls of SnapStart.
const BOOTSTRAP: &str = r#"#!/usr/bin/python3 -u
import http.client, json, os, sys, urllib.parse
api = http.client.HTTPConnection(os.environ["AWS_LAMBDA_RUNTIME_API"])
def call(method, path, body=None, headers={}):
    api.request(method, "/2018-06-01/runtime/" + path, body, headers)
    response = api.getresponse()
    return response, response.read()
steps = []
SETUP
if os.environ["AWS_LAMBDA_INITIALIZATION_TYPE"] == "snap-start":
    steps.append("before")
    assert call("GET", "restore/next")[0].status == 200
    steps.append("after")
    AFTER
while True:
    response, event = call("GET", "invocation/next")
    headers = response.headers
    request = headers["Lambda-Runtime-Aws-Request-Id"]
    event = json.loads(event)
    print("asked", event)
    HANDLE
    status = call("POST", "invocation/%s/response" % request, json.dumps(answer))[0].status
    assert status == 202, status
"#;

struct Custom {
    setup: &'static str,
    after: &'static str,
    handle: &'static str,
}

const ECHO: Custom = Custom { setup: "", after: "pass", handle: "answer = [steps, event]" };

impl Custom {
    /// Loads it as `bootstrap`.
    fn load(&self, host: &mut Host, snap_start: bool) -> Reply {
        self.load_as(host, |load| load.snap_start = snap_start)
    }

    fn load_as(&self, host: &mut Host, change: impl FnOnce(&mut Load)) -> Reply {
        let indented = self.handle.replace('\n', "\n    ");
        let source = BOOTSTRAP
            .replace("SETUP", self.setup)
            .replace("AFTER", &self.after.replace('\n', "\n    "))
            .replace("HANDLE", &indented);
        load_program(host, "bootstrap", true, source.as_bytes(), change)
    }

    fn start(&self, snap_start: bool) -> (TestGuest, Host) {
        let guest = TestGuest::start();
        let mut host = guest.connect();
        host.identify(1);
        let reply = self.load(&mut host, snap_start);
        assert!(matches!(reply, Reply::Loaded(_)), "{reply:?}");
        (guest, host)
    }
}

/// Sends a program in two parts and loads it.
fn load_program(
    host: &mut Host,
    path: &str,
    executable: bool,
    source: &[u8],
    change: impl FnOnce(&mut Load),
) -> Reply {
    let (head, tail) = source.split_at(source.len() / 2);
    for (part, append) in [(head, false), (tail, true)] {
        let put = Put {
            first: !append,
            path: path.into(),
            append,
            executable,
            contents: Base64Bytes(part.to_vec()),
            layer: false,
        };
        let reply = host.ask(&Request::Put(put));
        assert!(matches!(reply, Reply::Stored), "{reply:?}");
    }
    let mut load = load("");
    load.files.clear();
    load.version = "7".into();
    load.runtime = RuntimeKind::Provided;
    change(&mut load);
    host.ask(&Request::Load(load))
}

/// The date in UTC, on both sides of midnight if it is near.
pub(super) fn today() -> [String; 2] {
    let near = time::Duration::minutes(1);
    [time::OffsetDateTime::now_utc() - near, time::OffsetDateTime::now_utc() + near].map(|at| {
        let (year, month, day) = at.to_calendar_date();
        format!("{year}/{:02}/{day:02}", u8::from(month))
    })
}

fn prepare_freeze(guest: &TestGuest) -> Reply {
    guest.connect().ask(&Request::PrepareFreeze)
}

#[test]
fn bootstrap_answers_requests_in_sequence() {
    let (_guest, mut host) = ECHO.start(false);
    for turn in 0..3 {
        let answered = host.answered(&json!({ "turn": turn }));
        assert_eq!(answered.answer.get(), format!("[[], {{\"turn\": {turn}}}]"));
        assert!(answered.logs.starts_with("asked"), "{answered:?}");
    }
}

#[test]
fn bootstrap_gets_the_headers_of_the_request() {
    let handle = "answer = {k: v for k, v in headers.items() if k.startswith('Lambda-Runtime-')}";
    let (_guest, mut host) = Custom { handle, ..ECHO }.start(false);
    let reply = host.ask(&Request::Invoke(Invoke {
        request_id: "r-9".into(),
        event: to_raw_value(&1).unwrap(),
        time_limit_ms: TIME_LIMIT_MS,
        function_arn: Some("arn:f".into()),
        client_context: Some("{}".into()),
        trace_id: Some("Root=1".into()),
        credentials: None,
        stream: false,
    }));
    let Reply::Answered(answered) = reply else { panic!("{reply:?}") };
    let mut headers: Value = serde_json::from_str(answered.answer.get()).unwrap();
    let deadline = headers["Lambda-Runtime-Deadline-Ms"].take();
    assert!(deadline.as_str().unwrap().parse::<u64>().unwrap() > 0);
    let expected = json!({
        "Lambda-Runtime-Aws-Request-Id": "r-9",
        "Lambda-Runtime-Deadline-Ms": null,
        "Lambda-Runtime-Invoked-Function-Arn": "arn:f",
        "Lambda-Runtime-Client-Context": "{}",
        "Lambda-Runtime-Trace-Id": "Root=1",
    });
    assert_eq!(headers, expected);
}

#[test]
fn bootstrap_gets_the_environment_of_its_version() {
    let handle = "answer = [os.environ[k] for k in ('AWS_LAMBDA_FUNCTION_VERSION', '_HANDLER', 'AWS_LAMBDA_LOG_STREAM_NAME')]";
    let (_guest, mut host) = Custom { handle, ..ECHO }.start(false);
    let answer = host.answer(&json!(1));
    let stream = answer[2].as_str().unwrap();
    assert_eq!(answer, json!(["7", "handler.handler", stream]));
    let (date, rest) = stream.split_at("2026/11/24".len());
    assert_eq!(rest, "/[7]00000000000000000000000000000001");
    assert!(today().contains(&date.to_owned()), "{stream}");
}

/// Fetches the keys of the role as the AWS SDKs do: with the token, and with another one.
const FETCH: &str = "import urllib.request, urllib.error\n\
    def fetch(token):\n    \
        request = urllib.request.Request(os.environ['AWS_CONTAINER_CREDENTIALS_FULL_URI'], headers={'Authorization': token})\n    \
        try: return json.loads(urllib.request.urlopen(request).read())\n    \
        except urllib.error.HTTPError as error: return error.code\n";

#[test]
fn the_keys_of_the_role_are_those_of_the_last_request() {
    let keys = |name: &str, lifetime_s| RoleCredentials {
        access_key_id: name.to_owned(),
        secret_access_key: format!("{name}-secret"),
        session_token: String::new(),
        lifetime_s,
    };
    let handle = "answer = [fetch(os.environ['AWS_CONTAINER_AUTHORIZATION_TOKEN']), fetch('x')]";
    let custom = Custom { setup: FETCH, handle, ..ECHO };
    let guest = TestGuest::start();
    let mut host = guest.connect();
    host.identify(1);
    let expired = Some(RoleCredentials::expired());
    let reply = custom.load_as(&mut host, |load| load.credentials = expired);
    assert!(matches!(reply, Reply::Loaded(_)), "{reply:?}");
    let is_past = |document: &Value| {
        let end = document["Expiration"].as_str().unwrap();
        let form =
            time::macros::format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]Z");
        let end = time::PrimitiveDateTime::parse(end, form).unwrap().assume_utc();
        end <= time::OffsetDateTime::now_utc()
    };
    let first = host.answer(&json!(1));
    assert_eq!((&first[0]["AccessKeyId"], &first[1]), (&json!("EXPIRED"), &json!(403)));
    assert!(is_past(&first[0]), "{first}");
    let Request::Invoke(request) = invoke(&json!(1), TIME_LIMIT_MS) else { unreachable!() };
    let request = Invoke { credentials: Some(keys("AKID", 3600)), ..request };
    for request in [Request::Invoke(request), invoke(&json!(1), TIME_LIMIT_MS)] {
        let Reply::Answered(answered) = host.ask(&request) else { panic!("no answer") };
        let answer: Value = serde_json::from_str(answered.answer.get()).unwrap();
        let found = &answer[0];
        assert_eq!(
            (&found["AccessKeyId"], &found["SecretAccessKey"], &found["Token"]),
            (&json!("AKID"), &json!("AKID-secret"), &json!(""))
        );
        assert!(!is_past(found), "{found}");
    }
}

#[test]
fn a_role_without_keys_has_no_variables_for_them() {
    let handle = "answer = [k for k in os.environ if k.startswith('AWS_CONTAINER')]";
    let (_guest, mut host) = Custom { handle, ..ECHO }.start(false);
    assert_eq!(host.answer(&json!(1)), json!([]));
}

#[test]
fn a_function_can_replace_the_defaults_of_its_environment() {
    let handle =
        "answer = [os.environ[k] for k in ('AWS_XRAY_CONTEXT_MISSING', 'LD_LIBRARY_PATH', 'TZ')]";
    let guest = TestGuest::start();
    let mut host = guest.connect();
    host.identify(1);
    for own in [None, Some("own")] {
        let environment = own.map(|own| ("LD_LIBRARY_PATH".to_owned(), own.to_owned()));
        let custom = Custom { handle, ..ECHO };
        let reply = custom.load_as(&mut host, |load| load.environment.extend(environment));
        assert!(matches!(reply, Reply::Loaded(_)), "{reply:?}");
        let answer = host.answer(&json!(1));
        let found = answer[1].as_str().unwrap();
        let is_default = found.contains("/runtime:") && found.ends_with("/task/lib:/opt/lib");
        assert!(own.map_or(is_default, |own| found == own), "{answer}");
        assert_eq!((&answer[0], &answer[2]), (&json!("LOG_ERROR"), &json!(":UTC")));
    }
}

#[test]
fn after_restore_hooks_run_once_before_the_first_request() {
    let (guest, mut host) = ECHO.start(true);
    let early = refused(host.ask_function(&json!(0)));
    assert_eq!(early.kind, RefusalKind::NotIdentified);
    assert!(matches!(prepare_freeze(&guest), Reply::ReadyToFreeze));
    host.identify(2);
    for _ in 0..2 {
        assert_eq!(host.answer(&json!(1)), json!([["before", "after"], 1]));
    }
}

#[test]
fn only_a_snap_start_function_can_be_frozen() {
    let (guest, mut host) = ECHO.start(false);
    let refusal = refused(prepare_freeze(&guest));
    assert!(refusal.message.contains("SnapStart"), "{refusal:?}");
    host.identify(2);
    assert_eq!(host.answer(&json!(1)), json!([[], 1]));
}

#[test]
fn failed_after_restore_hook_keeps_the_gate_closed() {
    let after = "body = json.dumps({'errorType': 'HookError', 'errorMessage': 'no', 'stackTrace': []})\n\
                 call('POST', 'restore/error', body)\nsys.exit(65)";
    let (guest, mut host) = Custom { after, ..ECHO }.start(true);
    assert!(matches!(prepare_freeze(&guest), Reply::ReadyToFreeze));
    let reply = host.ask(&Request::Identify(identity(2)));
    let Reply::Failed(failed) = reply else { panic!("{reply:?}") };
    assert_eq!(
        (failed.error.error_type.as_str(), failed.error.error_message.as_str()),
        ("HookError", "no")
    );
    assert_eq!(refused(host.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);
}

#[test]
fn posted_errors_are_returned() {
    let handle = "if event == 'plain':\n    \
                      call('POST', 'invocation/%s/error' % request, 'no JSON', {'Lambda-Runtime-Function-Error-Type': 'Odd'})\n\
                  elif event == 'node':\n    \
                      call('POST', 'invocation/%s/error' % request, json.dumps({'errorType': 'E', 'errorMessage': 'm', 'trace': ['E: m', 'line']}))\n\
                  else:\n    \
                      call('POST', 'invocation/%s/error' % request, json.dumps({'errorType': 'E', 'errorMessage': 'm', 'requestId': request, 'stackTrace': ['line']}))\n\
                  continue";
    let (_guest, mut host) = Custom { handle, ..ECHO }.start(false);
    let error = host.failed(&json!(1)).error;
    let expected = FunctionError {
        error_type: "E".into(),
        error_message: "m".into(),
        request_id: Some("r-1".into()),
        frames: Some(Box::new(Frames::StackTrace(vec!["line".into()]))),
    };
    assert_eq!(error, expected);
    let node = serde_json::to_value(host.failed(&json!("node")).error).unwrap();
    assert_eq!(node, json!({ "errorType": "E", "errorMessage": "m", "trace": ["E: m", "line"] }));
    let error = host.failed(&json!("plain")).error;
    assert_eq!((error.error_type.as_str(), error.error_message.as_str()), ("Odd", "no JSON"));
}

#[test]
fn init_errors_are_returned() {
    let setup = "call('POST', 'init/error', json.dumps({'errorType': 'Runtime.ImportModuleError', 'errorMessage': 'm'})); sys.exit(1)";
    let guest = TestGuest::start();
    let mut host = guest.connect();
    let reply = Custom { setup, ..ECHO }.load(&mut host, false);
    let Reply::Failed(failed) = reply else { panic!("{reply:?}") };
    assert_eq!(failed.error.error_type, "Runtime.ImportModuleError");
    let reply = Custom { setup: "sys.exit(3)", ..ECHO }.load(&mut host, false);
    let Reply::Failed(failed) = reply else { panic!("{reply:?}") };
    assert_eq!(failed.error.error_type, "Runtime.ExitError");
    assert!(failed.error.error_message.contains("exit status: 3"), "{failed:?}");
}

#[test]
fn bootstrap_that_cannot_be_executed_is_an_error_of_the_function() {
    let guest = TestGuest::start();
    let mut host = guest.connect();
    const FOR_ARM: &[u8] = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\xb7\0\x01\0\0\0";
    let script = b"#!/usr/bin/python3";
    for (path, executable, source, reason) in [
        ("main", true, &script[..], "Couldn't find valid bootstrap(s): ["),
        ("bootstrap/main", true, script, "Couldn't find valid bootstrap(s): ["),
        ("bootstrap", false, script, "/bootstrap: permission denied"),
        ("bootstrap", true, b"#!/no/interpreter", "/bootstrap: no such file or directory"),
        ("bootstrap", true, b"print()", "/bootstrap: exec format error"),
        ("bootstrap", true, FOR_ARM, "/bootstrap: exec format error"),
    ] {
        let reply = load_program(&mut host, path, executable, source, |_| ());
        let Reply::Failed(Failed { error, .. }) = reply else { panic!("{path}: {reply:?}") };
        assert_eq!(error.error_type, "Runtime.InvalidEntrypoint", "{error:?}");
        assert!(error.error_message.contains(reason), "{error:?}");
    }
}

#[test]
fn runtime_of_the_image_runs_and_not_a_bootstrap_of_the_function() {
    let guest = TestGuest::start();
    let mut host = guest.connect();
    host.identify(1);
    let of_image = |load: &mut Load| load.runtime = RuntimeKind::Image;
    let reply = load_program(&mut host, "bootstrap", true, b"#!/bin/false", of_image);
    let Reply::Failed(Failed { error, .. }) = reply else { panic!("{reply:?}") };
    assert_eq!(error.error_type, "Runtime.InvalidEntrypoint", "{error:?}");
    assert!(error.error_message.ends_with("/runtime/bootstrap]"), "{error:?}");

    let path = guest.folder.path().join("runtime/bootstrap");
    fs::create_dir(path.parent().unwrap()).unwrap();
    let source = BOOTSTRAP.replace("SETUP", "").replace("AFTER", "pass");
    fs::write(&path, source.replace("HANDLE", "answer = os.listdir()")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let reply = load_program(&mut host, "bootstrap", true, b"#!/bin/false", of_image);
    assert!(matches!(reply, Reply::Loaded(_)), "{reply:?}");
    assert_eq!(host.answer(&json!(1)), json!(["bootstrap"]));
}

#[test]
fn calls_out_of_sequence_are_refused() {
    let handle = "statuses = [call('POST', 'invocation/other/response', '1')[0].status, call('GET', 'nothing')[0].status]\n\
                  answer = statuses";
    let (_guest, mut host) = Custom { handle, ..ECHO }.start(false);
    assert_eq!(host.answer(&json!(1)), json!([400, 404]));
}

#[test]
fn runtime_that_abandons_its_request_is_killed_and_restarted() {
    let handle = "if event == 1: continue\nif event == 2: sys.exit(4)\nanswer = event";
    let (_guest, mut host) = Custom { handle, ..ECHO }.start(false);
    assert_eq!(host.failed(&json!(1)).error.error_type, "Runtime.ExitError");
    assert_eq!(host.failed(&json!(2)).error.error_type, "Runtime.ExitError");
    assert_eq!(host.answer(&json!(3)), json!(3));
}

#[test]
fn answers_that_are_too_long_or_not_json_are_errors() {
    let handle = "if event == 'long':\n    \
                      answered = call('POST', 'invocation/%s/response' % request, b'1' * 6291557)[0].status\n    \
                      assert answered == 413\n    continue\n\
                  call('POST', 'invocation/%s/response' % request, b'{')\ncontinue";
    let (_guest, mut host) = Custom { handle, ..ECHO }.start(false);
    let error = host.failed(&json!("long")).error;
    assert_eq!(error.error_type, "Function.ResponseSizeTooLarge");
    assert_eq!(host.failed(&json!(1)).error.error_type, "Runtime.InvalidResponse");
}

/// `awslambdaric` exits when its answer is refused, and requests no event before.
#[test]
fn runtime_that_exits_after_a_refused_answer_is_replaced_for_the_next_request() {
    let handle = "if event == 'long':\n    \
                      call('POST', 'invocation/%s/response' % request, b'1' * 6291557)\n    \
                      sys.exit(1)\n\
                  answer = [steps, event]";
    for (snap_start, steps) in [(false, json!([])), (true, json!(["before", "after"]))] {
        let guest = TestGuest::start();
        let mut host = guest.connect();
        host.identify(1);
        let reply = Custom { handle, ..ECHO }.load(&mut host, snap_start);
        assert!(matches!(reply, Reply::Loaded(_)), "{reply:?}");
        if snap_start {
            assert!(matches!(prepare_freeze(&guest), Reply::ReadyToFreeze));
            host.identify(2);
        }
        for turn in 0..2 {
            let error = host.failed(&json!("long")).error;
            assert_eq!(error.error_type, "Function.ResponseSizeTooLarge");
            assert_eq!(host.answer(&json!(turn)), json!([steps, turn]), "{snap_start}");
        }
    }
}

#[test]
fn runtime_that_was_killed_between_requests_is_replaced() {
    let handle = "answer = os.getpid()";
    let (_guest, mut host) = Custom { handle, ..ECHO }.start(false);
    let killed = host.answer(&json!(1));
    // It calls for the next event meanwhile. The call outlives it.
    thread::sleep(Duration::from_millis(100));
    kill_and_wait(&killed);
    assert_ne!(host.answer(&json!(2)), killed);
}

#[test]
fn put_files_stay_in_the_functions_directory() {
    let guest = TestGuest::start();
    let mut host = guest.connect();
    for path in ["../x", "/x", "a//b", "", "a/./b"] {
        let put = Put {
            first: true,
            path: path.into(),
            append: false,
            executable: false,
            contents: Base64Bytes(vec![]),
            layer: false,
        };
        assert_eq!(refused(host.ask(&Request::Put(put))).kind, RefusalKind::BadRequest, "{path}");
    }
}

#[test]
fn layers_are_in_their_directory_and_a_layers_bootstrap_runs_without_one_of_the_function() {
    let guest = TestGuest::start();
    let mut host = guest.connect();
    host.identify(1);
    let mut put = |first, layer, path: &str, text: &str| {
        let contents = Base64Bytes(text.as_bytes().to_vec());
        let path = path.into();
        let put = Put { first, path, append: false, executable: true, contents, layer };
        let reply = host.ask(&Request::Put(put));
        assert!(matches!(reply, Reply::Stored), "{reply:?}");
    };
    let source = |text: &str| {
        let handle = format!("answer = {text}, open('../layers/data').read(), os.listdir()");
        BOOTSTRAP.replace("SETUP", "").replace("AFTER", "pass").replace("HANDLE", &handle)
    };
    put(false, true, "bootstrap", &source("'first'"));
    put(false, true, "data", "first");
    put(false, true, "bootstrap", &source("'second'"));
    // The function's files come last, and its first one removes none of the layers.
    put(true, false, "own", "");
    let mut program = load("");
    program.files.clear();
    program.runtime = RuntimeKind::Provided;
    let reply = host.ask(&Request::Load(program));
    assert!(matches!(reply, Reply::Loaded(_)), "{reply:?}");
    assert_eq!(host.answer(&json!(1)), json!(["second", "first", ["own"]]));
}
