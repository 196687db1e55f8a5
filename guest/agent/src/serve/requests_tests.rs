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
    for path in ["", "/etc/passwd", "../x", "a/../x", "a/./x", "a//x", "a/", ".", "a\0b", &long] {
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
