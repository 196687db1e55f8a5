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
