use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, any, proptest};

use super::*;

/// Returns its bytes in pieces of `step`, as a socket may.
struct Pieces<'a> {
    bytes: &'a [u8],
    step: usize,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.step.min(buffer.len()).min(self.bytes.len());
        buffer[..count].copy_from_slice(&self.bytes[..count]);
        self.bytes = &self.bytes[count..];
        Ok(count)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn frames_are_reassembled_from_any_pieces(payloads in vec(vec(any::<u8>(), 0..300), 0..4), step in 1_usize..40) {
        let mut bytes = Vec::new();
        for payload in &payloads {
            write_frame(&mut bytes, payload, 300).unwrap();
        }
        let mut pieces = Pieces { bytes: &bytes, step };
        for payload in &payloads {
            assert_eq!(&read_frame(&mut pieces, 300).unwrap(), payload);
        }
        assert!(matches!(read_frame(&mut pieces, 300), Err(FrameError::Closed)));
    }

    #[test]
    fn any_bytes_are_frames_or_errors(bytes in vec(any::<u8>(), 0..64), limit in 0_usize..64) {
        let mut rest = bytes.as_slice();
        while let Ok(payload) = read_frame(&mut rest, limit) {
            assert!(payload.len() <= limit);
        }
    }

    #[test]
    fn any_bytes_are_messages_or_errors(bytes in vec(any::<u8>(), 0..64)) {
        let mut frame = Vec::new();
        write_frame(&mut frame, &bytes, 64).unwrap();
        let _ = receive::<Request>(&mut frame.as_slice(), 64);
        let _ = receive::<Reply>(&mut frame.as_slice(), 64);
    }

    #[test]
    fn base64_round_trips(bytes in vec(any::<u8>(), 0..100)) {
        let sent = Base64Bytes(bytes);
        let text = serde_json::to_string(&sent).unwrap();
        assert_eq!(serde_json::from_str::<Base64Bytes>(&text).unwrap(), sent);
    }
}

#[test]
fn announced_length_over_the_limit_is_refused_before_reading() {
    let mut bytes: &[u8] = &[1, 1, 0, 0, 9, 9];
    match read_frame(&mut bytes, 256) {
        Err(FrameError::TooLong { length: 257, limit: 256 }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(bytes, [9, 9]);
}

#[test]
fn announced_length_allocates_no_memory_before_bytes_arrive() {
    let mut bytes: &[u8] = &[0, 0, 0, 0xC0, 1, 2, 3];
    assert!(matches!(read_frame(&mut bytes, usize::MAX), Err(FrameError::Truncated)));
}

#[test]
fn truncated_frame_is_an_error() {
    let mut whole = Vec::new();
    write_frame(&mut whole, b"abc", 3).unwrap();
    for end in 1..whole.len() {
        let mut part = &whole[..end];
        assert!(matches!(read_frame(&mut part, 3), Err(FrameError::Truncated)), "{end}");
    }
}

#[test]
fn message_over_the_limit_is_not_sent_partially() {
    let mut sent = Vec::new();
    let error = send(&mut sent, &"abcd", 5).unwrap_err();
    assert!(matches!(error, SendError::Frame(FrameError::TooLong { length: 6, limit: 5 })));
    assert!(sent.is_empty());
}

#[test]
fn slow_sender_does_not_delay_the_reader_beyond_the_deadline() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (&theirs).write_all(&[9, 0, 0, 0, 1]).unwrap();
    let deadline = Instant::now() + Duration::from_millis(20);
    let error = read_frame(&mut Timed::new(&ours, deadline), 9).unwrap_err();
    assert!(matches!(error, FrameError::TimedOut), "{error:?}");
    let error = read_frame(&mut Timed::new(&ours, deadline), 9).unwrap_err();
    assert!(matches!(error, FrameError::TimedOut), "past the deadline: {error:?}");
}

#[test]
fn slow_reader_does_not_delay_the_writer_beyond_the_deadline() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let deadline = Instant::now() + Duration::from_millis(20);
    let payload = vec![0; 8 << 20];
    let error = write_frame(&mut Timed::new(&ours, deadline), &payload, usize::MAX).unwrap_err();
    assert!(matches!(error, FrameError::TimedOut), "{error:?}");
}

/// The encoding is fixed, because newer hosts communicate with the older agents in existing
/// snapshots.
#[test]
fn encoding_of_version_1_is_stable() {
    let event = || RawValue::from_string(r#"{"b": 1, "a": [1.50]}"#.into()).unwrap();
    let error = FunctionError {
        error_type: "KeyError".into(),
        error_message: "'x'".into(),
        request_id: None,
        frames: Some(Box::new(Frames::StackTrace(vec!["  File".into()]))),
    };
    let failed = Failed::new(error, String::new());
    let status = Status {
        agent: "1".into(),
        function: None,
        handler: None,
        open: true,
        instance_id: Some("i".into()),
        invocations: 2,
    };
    let refusal = |kind| Reply::Refused(Refusal { kind, message: "m".into() });
    let requests = [
        (Request::Hello { oldest: 1, newest: 2 }, r#"{"hello":{"oldest":1,"newest":2}}"#),
        (
            Request::Load(Load {
                name: "n".into(),
                handler: "h.h".into(),
                files: BTreeMap::from([("h.py".into(), Base64Bytes(vec![255, 0]))]),
                environment: BTreeMap::from([("A".into(), "b".into())]),
                memory_mib: 256,
                time_limit_ms: 9,
                version: "3".into(),
                runtime: RuntimeKind::Python,
                snap_start: true,
                credentials: None,
            }),
            r#"{"load":{"name":"n","handler":"h.h","files":{"h.py":"/wA="},"environment":{"A":"b"},"memory_mib":256,"time_limit_ms":9,"version":"3","runtime":"python","snap_start":true}}"#,
        ),
        (
            Request::Put(Put {
                first: true,
                path: "h.py".into(),
                append: false,
                executable: false,
                contents: Base64Bytes(vec![255, 0]),
                layer: false,
            }),
            r#"{"put":{"first":true,"path":"h.py","append":false,"executable":false,"contents":"/wA="}}"#,
        ),
        (
            Request::Invoke(Invoke {
                request_id: "r".into(),
                event: event(),
                time_limit_ms: 9,
                function_arn: None,
                client_context: None,
                trace_id: None,
                credentials: None,
                stream: false,
            }),
            r#"{"invoke":{"request_id":"r","event":{"b": 1, "a": [1.50]},"time_limit_ms":9}}"#,
        ),
        (Request::PrepareFreeze, r#""prepare_freeze""#),
        (
            Request::Identify(Identify {
                generation: Uuid::from_u128(0xAB),
                instance_id: "i".into(),
                wall_clock_ns: 1,
                entropy: Base64Bytes(vec![1]),
                credentials: None,
                network: None,
                metadata: None,
            }),
            r#"{"identify":{"generation":"000000000000000000000000000000ab","instance_id":"i","wall_clock_ns":1,"entropy":"AQ=="}}"#,
        ),
        (Request::Status, r#""status""#),
        (Request::Pages, r#""pages""#),
        (Request::Shutdown, r#""shutdown""#),
    ];
    for (message, text) in requests {
        assert_eq!(serde_json::to_string(&message).unwrap(), text);
        let again: Request = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&again).unwrap(), text);
    }
    let replies = [
        (Reply::Hello { version: 1 }, r#"{"hello":{"version":1}}"#),
        (
            Reply::Loaded(Loaded { duration_ns: 5, logs: "l".into() }),
            r#"{"loaded":{"duration_ns":5,"logs":"l"}}"#,
        ),
        (
            Reply::Answered(Answered {
                request_id: "r".into(),
                answer: event(),
                duration_ns: 5,
                logs: String::new(),
                max_memory_bytes: 0,
            }),
            r#"{"answered":{"request_id":"r","answer":{"b": 1, "a": [1.50]},"duration_ns":5,"logs":""}}"#,
        ),
        (
            Reply::Failed(failed),
            r#"{"failed":{"error":{"errorType":"KeyError","errorMessage":"'x'","stackTrace":["  File"]},"logs":""}}"#,
        ),
        (Reply::ReadyToFreeze, r#""ready_to_freeze""#),
        (Reply::Identified, r#""identified""#),
        (
            Reply::Status(status),
            r#"{"status":{"agent":"1","function":null,"handler":null,"open":true,"instance_id":"i","invocations":2}}"#,
        ),
        (Reply::ShuttingDown, r#""shutting_down""#),
        (refusal(RefusalKind::Version), r#"{"refused":{"kind":"version","message":"m"}}"#),
        (refusal(RefusalKind::BadRequest), r#"{"refused":{"kind":"bad_request","message":"m"}}"#),
        (
            refusal(RefusalKind::NotIdentified),
            r#"{"refused":{"kind":"not_identified","message":"m"}}"#,
        ),
        (refusal(RefusalKind::Frozen), r#"{"refused":{"kind":"frozen","message":"m"}}"#),
        (refusal(RefusalKind::NotLoaded), r#"{"refused":{"kind":"not_loaded","message":"m"}}"#),
        (refusal(RefusalKind::System), r#"{"refused":{"kind":"system","message":"m"}}"#),
    ];
    for (message, text) in replies {
        assert_eq!(serde_json::to_string(&message).unwrap(), text);
        let again: Reply = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&again).unwrap(), text);
    }
}
