use axum::http::header::SET_COOKIE;
use firn_control::{InvokeFailure, Served};
use proptest::prelude::*;

use super::*;
use crate::streamed::tests::{Ending, read, served, stream_of};

/// The response with an answer of these parts, and how its body is read.
async fn respond_to(
    kind: Option<&str>,
    parts: &[&[u8]],
    ending: Ending,
) -> (Response, (Vec<u8>, bool)) {
    let answering = Answering::Stream(stream_of(kind, parts, ending));
    let (head, body) = respond(answering).await.unwrap().into_parts();
    let read = read(Response::from_parts(head.clone(), body)).await;
    (Response::from_parts(head, axum::body::Body::empty()), read)
}

#[tokio::test]
async fn an_answer_without_a_head_is_the_body() {
    for (kind, expected) in [(None, "application/octet-stream"), (Some("text/x"), "text/x")] {
        let (response, body) =
            respond_to(kind, &[b"{\"statusCode\":", b"201}"], Ending::Answered).await;
        assert_eq!(
            (response.status().as_u16(), &response.headers()[CONTENT_TYPE]),
            (200, &HeaderValue::from_static(expected))
        );
        assert_eq!(body, (b"{\"statusCode\":201}".to_vec(), true));
    }
}

#[tokio::test]
async fn the_head_of_an_answer_is_that_of_the_response() {
    let head = br#"{"statusCode":201,"headers":{"Content-Type":"text/x","x-n":1},"cookies":["a=b","c=d"]}"#;
    let whole = [&head[..], SEPARATOR, b"body\0\0"].concat();
    // Cut anywhere, also within the zero bytes.
    for at in 0..whole.len() {
        let (first, second) = whole.split_at(at);
        let (response, body) =
            respond_to(Some(WITH_PRELUDE), &[first, second], Ending::Answered).await;
        let headers = response.headers();
        assert_eq!(
            (response.status().as_u16(), &headers[CONTENT_TYPE], &headers["x-n"]),
            (201, &HeaderValue::from_static("text/x"), &HeaderValue::from_static("1"))
        );
        let cookies: Vec<_> = headers.get_all(SET_COOKIE).iter().collect();
        assert_eq!(cookies, ["a=b", "c=d"]);
        assert_eq!(body, (b"body\0\0".to_vec(), true), "{at}");
    }
    let empty = [&b"{}"[..], SEPARATOR].concat();
    let (response, body) = respond_to(Some(WITH_PRELUDE), &[&empty], Ending::Answered).await;
    assert_eq!((response.status().as_u16(), body), (200, (vec![], true)));
}

#[tokio::test]
async fn an_answer_whose_head_is_not_valid_is_a_bad_gateway() {
    let long = vec![b' '; MAX_PRELUDE + 1];
    for parts in [
        &[&b"{}"[..]][..],
        &[],
        &[b"{", SEPARATOR],
        &[b"{\"statusCode\":99999}", SEPARATOR],
        &[&long, b"{}", SEPARATOR],
    ] {
        let (response, _) = respond_to(Some(WITH_PRELUDE), parts, Ending::Answered).await;
        assert_eq!(response.status().as_u16(), 502, "{parts:?}");
    }
}

#[tokio::test]
async fn an_error_after_the_head_cuts_the_body_off() {
    for ending in [Ending::Failed, Ending::Restore, Ending::Lost] {
        let (response, body) = respond_to(None, &[b"a"], ending).await;
        assert_eq!((response.status().as_u16(), body), (200, (b"a".to_vec(), false)));
    }
}

#[tokio::test]
async fn a_function_that_does_not_stream_answers_as_a_whole() {
    let whole = |ending| {
        let Served { invoked, .. } = served(ending);
        Answering::Whole(Box::new(invoked))
    };
    let response = respond(whole(Ending::Answered)).await.unwrap();
    assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
    assert_eq!(read(response).await, (b"null".to_vec(), true));
    assert_eq!(respond(whole(Ending::Failed)).await.unwrap().status(), 502);
    let Answering::Whole(refused) = whole(Ending::Restore) else { unreachable!() };
    assert!(matches!(refused.outcome, Err(InvokeFailure::Restore(_))));
    assert!(respond(Answering::Whole(refused)).await.is_err());
}

proptest! {
    /// Whatever a function sends, its client gets a response.
    #[test]
    fn any_answer_is_a_response(parts in proptest::collection::vec(proptest::collection::vec(proptest::sample::select(&b"{}\0a\""[..]), 1..12), 0..6)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let (response, (body, _)) =
            runtime.block_on(respond_to(Some(WITH_PRELUDE), &parts, Ending::Answered));
        let sent = parts.concat();
        match response.status().as_u16() {
            200 => prop_assert!(sent.ends_with(&body)),
            status => prop_assert_eq!(status, 502),
        }
    }
}
