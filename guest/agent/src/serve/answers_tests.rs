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
