use axum::response::IntoResponse;

use super::*;
use crate::streamed::tests::{Ending, read, stream_of};

/// The messages of an answer, as botocore's `EventStreamBuffer` has read them: event, payload.
async fn events(response: Response) -> Vec<(String, String)> {
    assert_eq!(response.headers()[CONTENT_TYPE], "application/vnd.amazon.eventstream");
    for gone in [FUNCTION_ERROR, LOG_RESULT] {
        assert!(!response.headers().contains_key(gone));
    }
    let (bytes, whole) = read(response).await;
    assert!(whole);
    let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let (length, headers) = (number(at) as usize, number(at + 4) as usize);
        assert_eq!(number(at + 8), crc32fast::hash(&bytes[at..at + 8]));
        let end = at + length;
        assert_eq!(number(end - 4), crc32fast::hash(&bytes[at..end - 4]));
        let (names, payload) = bytes[at + 12..end - 4].split_at(headers);
        let names = String::from_utf8_lossy(names);
        let event =
            ["PayloadChunk", "InvokeComplete"].into_iter().find(|name| names.contains(name));
        found.push((event.unwrap().to_owned(), String::from_utf8(payload.to_vec()).unwrap()));
        at = end;
    }
    found
}

#[tokio::test]
async fn an_answer_is_a_chunk_and_the_end() {
    let answer = [(LOG_RESULT, "bG9n")].into_response();
    let (parts, _) = answer.into_parts();
    let found = events(of(Response::from_parts(parts, Body::from("[1]"))).await).await;
    let expected = [("PayloadChunk", "[1]"), ("InvokeComplete", r#"{"LogResult":"bG9n"}"#)];
    assert_eq!(found, expected.map(|(event, payload)| (event.to_owned(), payload.to_owned())));
}

#[tokio::test]
async fn an_error_of_the_function_is_in_the_end() {
    let answer = ([(FUNCTION_ERROR, "Unhandled")], r#"{"errorType":"E"}"#).into_response();
    let found = events(of(answer).await).await;
    let [(event, payload)] = &found[..] else { panic!("{found:?}") };
    let payload: Value = serde_json::from_str(payload).unwrap();
    assert_eq!((event.as_str(), &payload["ErrorCode"]), ("InvokeComplete", &"Unhandled".into()));
    assert_eq!(payload["ErrorDetails"], r#"{"errorType":"E"}"#);
}

#[tokio::test]
async fn the_parts_of_a_streamed_answer_are_chunks() {
    for (ending, end) in [
        (Ending::Answered, r#"{"LogResult":"bG9n"}"#),
        (
            Ending::Failed,
            r#"{"LogResult":"bG9n","ErrorCode":"Unhandled","ErrorDetails":"{\"errorType\":\"E\",\"errorMessage\":\"m\"}"}"#,
        ),
        (
            Ending::Restore,
            r#"{"LogResult":"bG9n","ErrorCode":"ServiceException","ErrorDetails":"the function could not be restored: E: m"}"#,
        ),
    ] {
        let found = events(streamed(stream_of(None, &[b"a", b"bc"], ending), true)).await;
        let [first, second, (last, complete)] = &found[..] else { panic!("{found:?}") };
        let chunk = |payload: &str| ("PayloadChunk".to_owned(), payload.to_owned());
        assert_eq!((first, second, &**last), (&chunk("a"), &chunk("bc"), "InvokeComplete"));
        let parsed = |json: &str| serde_json::from_str::<Value>(json).unwrap();
        assert_eq!(parsed(complete), parsed(end));
    }
    let found = events(streamed(stream_of(None, &[], Ending::Answered), false)).await;
    assert_eq!(found, [("InvokeComplete".to_owned(), "{}".to_owned())]);
    let (_, whole) = read(streamed(stream_of(None, &[b"a"], Ending::Lost), false)).await;
    assert!(!whole);
}

/// The bytes that botocore 1.44 reads as an event with these headers and this payload.
#[test]
fn a_message_has_the_form_of_the_specification() {
    let mut stream = Vec::new();
    message(&mut stream, "InvokeComplete", "application/json", b"{}");
    let hex: String = stream.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        hex,
        "00000066000000541f56c8690d3a6d6573736167652d747970650700056576656e740b3a6576656e742d7479706507000e496e766f6b65436f6d706c6574650d3a636f6e74656e742d747970650700106170706c69636174696f6e2f6a736f6e7b7dface259a"
    );
}
