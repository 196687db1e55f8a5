use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use firn_snapshot::{Begin, Begun, Freeze, FunctionInfo, Seal, Target};

use super::{ControlClient, ControlError, Request, Response};

#[test]
fn each_request_is_one_json_object() {
    let function = FunctionInfo { name: "hello".into(), handler: "a.b".into() };
    let cases = [
        (
            Request::Freeze(Begin { target: Target::Files { dense: true }, function: None }),
            r#"{"request":"freeze","target":{"files":{"dense":true}},"function":null}"#,
        ),
        (
            Request::Freeze(Begin { target: Target::Extent, function: Some(function) }),
            r#"{"request":"freeze","target":"extent","function":{"name":"hello","handler":"a.b"}}"#,
        ),
        (
            Request::Seal { seal: Seal::Container { protected: Vec::new() } },
            r#"{"request":"seal","seal":{"container":{"protected":[]}}}"#,
        ),
        (Request::Seal { seal: Seal::Extent }, r#"{"request":"seal","seal":"extent"}"#),
    ];
    for (request, expected) in cases {
        assert_eq!(serde_json::to_string(&request).unwrap(), expected);
        let read: Request = serde_json::from_str(expected).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), expected);
    }
    assert!(serde_json::from_str::<Request>(r#"{"request":"melt"}"#).is_err());
}

#[test]
fn a_socket_without_a_listener_means_that_the_microvm_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control.sock");
    assert!(
        matches!(ControlClient::connect(&path).unwrap_err(), ControlError::Gone(p) if p == path)
    );
    drop(UnixListener::bind(&path).unwrap());
    assert!(matches!(ControlClient::connect(&path).unwrap_err(), ControlError::Gone(_)));
}

fn serve_once(path: &std::path::Path, answer: &'static [u8]) -> std::thread::JoinHandle<String> {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _): (UnixStream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
        stream.write_all(answer).unwrap();
        line
    })
}

#[test]
fn errors_of_the_monitor_closed_connections_and_invalid_responses_differ() {
    let dir = tempfile::tempdir().unwrap();
    type Expected = fn(&ControlError) -> bool;
    let cases: [(&[u8], Expected); 3] = [
        (b"{\"response\":\"error\",\"message\":\"no room\"}\n", |error| {
            error.to_string() == "no room"
        }),
        (b"", |error| matches!(error, ControlError::Ended(_))),
        (b"nonsense\n", |error| matches!(error, ControlError::Answer { .. })),
    ];
    for (number, (answer, expected)) in cases.into_iter().enumerate() {
        let path = dir.path().join(number.to_string());
        let server = serve_once(&path, answer);
        let mut client = ControlClient::connect(&path).unwrap();
        let error = client.request(&Request::Stop).unwrap_err();
        assert!(expected(&error), "{error:?}");
        assert_eq!(server.join().unwrap(), "{\"request\":\"stop\"}\n");
    }
}

#[test]
fn responses_are_returned() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control.sock");
    let server = serve_once(&path, b"{\"response\":\"done\"}\n");
    let mut client = ControlClient::connect(&path).unwrap();
    assert!(matches!(client.request(&Request::Status).unwrap(), Response::Done));
    server.join().unwrap();
}

#[test]
fn stopping_succeeds_if_the_microvm_ends_before_it_responds() {
    let dir = tempfile::tempdir().unwrap();
    for (name, answer) in [("silent", &b""[..]), ("responding", b"{\"response\":\"done\"}\n")] {
        let path = dir.path().join(name);
        let server = serve_once(&path, answer);
        ControlClient::connect(&path).unwrap().stop().unwrap();
        server.join().unwrap();
    }
    let path = dir.path().join("failing");
    let server = serve_once(&path, b"{\"response\":\"error\",\"message\":\"no\"}\n");
    let error = ControlClient::connect(&path).unwrap().stop().unwrap_err();
    assert!(matches!(error, ControlError::Refused(_)), "{error:?}");
    server.join().unwrap();
}

#[test]
fn a_response_to_another_request_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let begin = || Begin { target: Target::Extent, function: None };
    let mismatch = |answer: &'static [u8], name: &str, seal: bool| {
        let path = dir.path().join(name);
        let server = serve_once(&path, answer);
        let mut client = ControlClient::connect(&path).unwrap();
        let error = if seal {
            client.seal(Seal::Container { protected: Vec::new() }, Vec::new()).unwrap_err()
        } else {
            client.write(begin(), Vec::new()).unwrap_err()
        };
        assert!(matches!(error, ControlError::Mismatch(_)), "{error:?}");
        server.join().unwrap();
    };
    mismatch(b"{\"response\":\"done\"}\n", "write", false);
    let begun = br#"{"response":"begun","begun":{"files":{"overlay":true}}}
"#;
    mismatch(begun, "seal", true);
    let path = dir.path().join("honest");
    let server = serve_once(&path, begun);
    let answer = ControlClient::connect(&path).unwrap().write(begin(), Vec::new()).unwrap();
    assert_eq!(answer, Begun::Files { overlay: true });
    server.join().unwrap();
}

#[test]
fn descriptors_that_come_with_a_response_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let server = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        BufReader::new(&stream).read_line(&mut String::new()).unwrap();
        super::wire::send(&stream, &Response::Done, &[writer.into()]).unwrap();
    });
    let mut client = ControlClient::connect(&path).unwrap();
    assert!(matches!(client.request(&Request::Status).unwrap(), Response::Done));
    server.join().unwrap();
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    drop(client);
}
