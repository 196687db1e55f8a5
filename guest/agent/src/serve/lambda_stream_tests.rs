//! Answers that arrive in parts.

use super::*;
use crate::protocol::MAX_PART_BYTES;

/// Streams an answer, as AWS's documents describe it for custom runtimes.
const STREAM: &str = r#"
import base64, select, time
def begin(mode="streaming"):
    api.putrequest("POST", "/2018-06-01/runtime/invocation/%s/response" % request)
    api.putheader("Lambda-Runtime-Function-Response-Mode", mode)
    api.putheader("Transfer-Encoding", "chunked")
    api.putheader("Content-Type", "text/x")
    api.endheaders()
def part(data):
    api.send(b"%x\r\n%s\r\n" % (len(data), data))
def end(trailers=b""):
    api.send(b"0\r\n" + trailers + b"\r\n")
    response = api.getresponse()
    response.read()
    return response.status
def wait_for_host():
    while not os.path.exists("go"):
        time.sleep(0.001)
"#;

impl Custom {
    const fn streaming(handle: &'static str) -> Self {
        Self { setup: STREAM, after: "pass", handle }
    }
}

impl Host {
    fn receive(&mut self) -> Reply {
        receive(&mut self.0, MAX_REPLY_LENGTH).unwrap()
    }

    /// Sends an event whose answer may come in parts. Returns the first reply.
    fn ask_for_parts(&mut self, event: &Value, time_limit_ms: u64) -> Reply {
        let Request::Invoke(request) = invoke(event, time_limit_ms) else { unreachable!() };
        self.ask(&Request::Invoke(Invoke { stream: true, ..request }))
    }

    /// The rest of a streamed answer, and the reply after it.
    fn rest(&mut self) -> (Vec<u8>, Reply) {
        let mut bytes = Vec::new();
        loop {
            match self.receive() {
                Reply::Part(Base64Bytes(part)) => {
                    assert!((1..=MAX_PART_BYTES).contains(&part.len()), "{}", part.len());
                    bytes.extend(part);
                }
                reply => return (bytes, reply),
            }
        }
    }
}

fn assert_begun(reply: &Reply) {
    let Reply::Begun { content_type } = reply else { panic!("{reply:?}") };
    assert_eq!(content_type.as_deref(), Some("text/x"));
}

#[test]
fn parts_of_an_answer_arrive_while_the_function_runs() {
    let handle = "begin()\npart(b'one')\nwait_for_host()\npart(b'two')\n\
                  assert end() == 202\nprint('done')\ncontinue";
    let (guest, mut host) = Custom::streaming(handle).start(false);
    assert_begun(&host.ask_for_parts(&json!(1), TIME_LIMIT_MS));
    let first = host.receive();
    assert!(matches!(&first, Reply::Part(Base64Bytes(part)) if part == b"one"), "{first:?}");
    fs::write(guest.folder.path().join("task/go"), "").unwrap();
    let (rest, reply) = host.rest();
    let Reply::Answered(answered) = reply else { panic!("{reply:?}") };
    assert_eq!((&*rest, answered.answer.get()), (&b"two"[..], "null"));
    assert!(answered.logs.starts_with("asked 1\n"), "{answered:?}");
}

#[test]
fn a_host_that_does_not_ask_for_parts_gets_a_streamed_answer_as_a_whole() {
    let handle = "begin()\npart(b'[1,')\npart(b'2]')\nassert end() == 202\ncontinue";
    let (_guest, mut host) = Custom::streaming(handle).start(false);
    for _ in 0..2 {
        assert_eq!(host.answer(&json!(1)), json!([1, 2]));
    }
}

#[test]
fn the_trailers_of_a_streamed_answer_have_its_error() {
    let handle = "begin()\npart(b'one')\n\
                  body = base64.b64encode(json.dumps({'errorMessage': 'm', 'stackTrace': ['line']}).encode())\n\
                  assert end(b'Lambda-Runtime-Function-Error-Type: Midstream\\r\\nLambda-Runtime-Function-Error-Body: ' + body + b'\\r\\n') == 202\n\
                  continue";
    let (_guest, mut host) = Custom::streaming(handle).start(false);
    for _ in 0..2 {
        assert_begun(&host.ask_for_parts(&json!(1), TIME_LIMIT_MS));
        let (bytes, reply) = host.rest();
        let Reply::Failed(Failed { error, .. }) = reply else { panic!("{reply:?}") };
        let frames = Frames::StackTrace(vec!["line".into()]);
        assert_eq!(
            (&*bytes, &*error.error_type, &*error.error_message, error.frames),
            (&b"one"[..], "Midstream", "m", Some(Box::new(frames)))
        );
    }
}

#[test]
fn a_streamed_answer_without_its_end_is_an_error() {
    let handle = "begin()\npart(b'one')\nif event == 'exit': sys.exit(3)\napi.close()\ncontinue";
    let (_guest, mut host) = Custom::streaming(handle).start(false);
    for (event, kind) in [
        ("close", "Runtime.TruncatedResponse"),
        ("close", "Runtime.TruncatedResponse"),
        ("exit", "Runtime.ExitError"),
        ("close", "Runtime.TruncatedResponse"),
    ] {
        let mut reply = host.ask_for_parts(&json!(event), TIME_LIMIT_MS);
        if matches!(reply, Reply::Begun { .. }) {
            reply = host.rest().1;
        }
        let Reply::Failed(Failed { error, .. }) = reply else { panic!("{reply:?}") };
        assert_eq!(error.error_type, kind, "{error:?}");
    }
}

/// The agent has not read all of the answer when the runtime closes the connection.
#[test]
fn a_runtime_may_close_the_connection_after_its_answer() {
    const LENGTH: usize = 512 << 10;
    let handle = "begin()\npart(bytes(event))\napi.send(b'0\\r\\n\\r\\n')\napi.close()\n\
                  open('closed', 'w')\ncontinue";
    let (guest, mut host) = Custom::streaming(handle).start(false);
    assert_begun(&host.ask_for_parts(&json!(LENGTH), TIME_LIMIT_MS));
    while !guest.folder.path().join("task/closed").exists() {
        thread::sleep(Duration::from_millis(1));
    }
    let (bytes, reply) = host.rest();
    assert!(matches!(reply, Reply::Answered(_)), "{reply:?}");
    assert_eq!(bytes.len(), LENGTH);
}

#[test]
fn a_streamed_answer_over_the_limit_and_an_unknown_mode_are_refused() {
    let handle = "if event == 'mode':\n    \
                      begin('other')\n    \
                      assert end() == 400\n    \
                      answer = 1\n\
                  else:\n    \
                      begin()\n    \
                      part(b'1' * 6291556)\n    \
                      part(b'1')\n    \
                      assert end() == 413\n    \
                      continue";
    let (_guest, mut host) = Custom::streaming(handle).start(false);
    let error = host.failed(&json!("long")).error;
    assert_eq!(error.error_type, "Function.ResponseSizeTooLarge");
    assert_eq!(host.answer(&json!("mode")), json!(1));
}

#[test]
fn the_time_limit_ends_a_function_that_streams_without_a_pause() {
    let handle = "if event == 1:\n    begin()\n    while True: part(b'x')\nanswer = event";
    let (_guest, mut host) = Custom::streaming(handle).start(false);
    assert_begun(&host.ask_for_parts(&json!(1), 500));
    let (_, reply) = host.rest();
    let Reply::Failed(Failed { error, .. }) = reply else { panic!("{reply:?}") };
    assert!(error.is_time_out(), "{error:?}");
    assert_eq!(host.answer(&json!(2)), json!(2));
}

/// The function sends until the connection takes no more for a second, and the host reads nothing
/// meanwhile.
#[test]
fn a_function_waits_for_a_host_that_does_not_read() {
    const LENGTH: usize = 64 << 20;
    let handle = "begin()\n\
                  api.send(b'%x\\r\\n' % event)\n\
                  data = bytes(event)\n\
                  sent = 0\n\
                  while sent < event and select.select([], [api.sock], [], 1)[1]:\n    \
                      sent += api.sock.send(data[sent:sent + 65536])\n\
                  open('sent.new', 'w').write(str(sent))\n\
                  os.rename('sent.new', 'sent')\n\
                  api.sock.sendall(data[sent:] + b'\\r\\n')\n\
                  assert end() == 202\ncontinue";
    let (guest, mut host) = Custom::streaming(handle).start(false);
    assert_begun(&host.ask_for_parts(&json!(LENGTH), TIME_LIMIT_MS));
    let sent = guest.folder.path().join("task/sent");
    while !sent.exists() {
        thread::sleep(Duration::from_millis(1));
    }
    let sent: usize = fs::read_to_string(&sent).unwrap().parse().unwrap();
    assert!(sent < LENGTH, "the agent took all of {LENGTH} bytes");
    let (bytes, reply) = host.rest();
    assert!(matches!(reply, Reply::Answered(_)), "{reply:?}");
    assert_eq!(bytes.len(), LENGTH);
}
