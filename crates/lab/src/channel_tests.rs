use proptest::prelude::{Just, Strategy, any, prop_oneof, proptest};

use super::{Kind, MAX_CONTENT, ReceiveError, Sender, receive};

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Ready),
        Just(Kind::Stdout),
        Just(Kind::Stderr),
        Just(Kind::Results),
        Just(Kind::Exit),
        Just(Kind::Failure)
    ]
}

fn sent(frames: &[(Kind, Vec<u8>)]) -> Vec<u8> {
    let sender = Sender::new(Vec::new());
    for (kind, content) in frames {
        sender.send(*kind, content).unwrap();
    }
    sender.0.into_inner().unwrap()
}

proptest! {
    #[test]
    fn frames_arrive_as_sent(frames in proptest::collection::vec((kinds(), proptest::collection::vec(any::<u8>(), 0..300)), 0..20)) {
        let stream = sent(&frames);
        let mut rest = stream.as_slice();
        let mut content = Vec::new();
        for (kind, expected) in &frames {
            assert_eq!(receive(&mut rest, &mut content).unwrap(), *kind);
            assert_eq!(content, *expected);
        }
        assert!(matches!(receive(&mut rest, &mut content), Err(ReceiveError::Ended)));
    }

    #[test]
    fn random_bytes_end_in_an_error_within_the_memory_of_a_frame(bytes in proptest::collection::vec(any::<u8>(), 0..4000)) {
        let mut rest = bytes.as_slice();
        let mut content = Vec::new();
        while receive(&mut rest, &mut content).is_ok() {}
        assert!(content.capacity() <= 2 * MAX_CONTENT);
    }
}

#[test]
fn long_content_is_cut_into_frames() {
    let long: Vec<u8> = (0..=250).cycle().take(2 * MAX_CONTENT + 1).collect();
    let stream = sent(&[(Kind::Stdout, long.clone())]);
    let (mut rest, mut content, mut joined) = (stream.as_slice(), Vec::new(), Vec::<u8>::new());
    for _ in 0..3 {
        assert_eq!(receive(&mut rest, &mut content).unwrap(), Kind::Stdout);
        joined.extend(&content);
    }
    assert!(rest.is_empty());
    assert_eq!(joined, long);
}

#[test]
fn invalid_frames_are_reported() {
    let mut content = Vec::new();
    let unknown = receive(&mut [99, 0, 0, 0, 0].as_slice(), &mut content);
    assert!(matches!(unknown, Err(ReceiveError::Malformed { kind: 99, length: 0 })));
    let too_long = receive(&mut [2, 1, 0, 1, 0].as_slice(), &mut content);
    assert!(matches!(too_long, Err(ReceiveError::Malformed { kind: 2, length: 65537 })));
    let cut = receive(&mut [2, 3, 0, 0, 0, b'a'].as_slice(), &mut content);
    assert!(matches!(cut, Err(ReceiveError::Ended)));
}
