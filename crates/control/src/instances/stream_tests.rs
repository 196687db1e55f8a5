use std::future::poll_fn;
use std::time::Duration;

use tokio::task::spawn_blocking;

use super::*;
use crate::instances::{InvocationReport, InvokeFailure};

const LATER: Duration = Duration::from_secs(600);

fn invoked() -> Invoked {
    let failure = InvokeFailure::Restore(firn_run::FunctionError {
        error_type: "E".into(),
        error_message: "m".into(),
        ..firn_run::FunctionError::default()
    });
    let report = InvocationReport::default();
    Invoked { outcome: Err(failure), report, log: String::new() }
}

/// What `function` streams, from a thread as that of a microVM's client.
async fn stream(function: impl FnOnce(&mut AnswerSender) + Send + 'static) -> Answering {
    let (mut sender, beginning, parts) = AnswerSender::new();
    let task = tokio::spawn(async move {
        let complete = spawn_blocking(move || {
            function(&mut sender);
            sender.is_complete()
        });
        Served { invoked: invoked(), complete: complete.await.unwrap() }
    });
    answering(beginning, parts, task).await
}

async fn streamed(function: impl FnOnce(&mut AnswerSender) + Send + 'static) -> AnswerStream {
    match stream(function).await {
        Answering::Stream(stream) => stream,
        whole => panic!("{whole:?}"),
    }
}

async fn next(stream: &mut AnswerStream) -> AnswerEvent {
    poll_fn(|context| stream.poll_next(context)).await
}

#[tokio::test]
async fn an_answer_without_a_stream_comes_with_its_end() {
    assert!(matches!(stream(|_| ()).await, Answering::Whole(_)));
}

#[tokio::test]
async fn parts_come_before_the_function_ends() {
    let (go, wait) = std::sync::mpsc::channel();
    let mut stream = streamed(move |sender| {
        sender.begin(Some("text/x".into()));
        sender.part(b"a".to_vec(), Instant::now() + LATER);
        wait.recv().unwrap();
        sender.part(b"b".to_vec(), Instant::now() + LATER);
    })
    .await;
    assert_eq!(stream.content_type(), Some("text/x"));
    let first = next(&mut stream).await;
    assert!(matches!(&first, AnswerEvent::Part(part) if part == b"a"), "{first:?}");
    go.send(()).unwrap();
    let second = next(&mut stream).await;
    assert!(matches!(&second, AnswerEvent::Part(part) if part == b"b"), "{second:?}");
    assert!(matches!(next(&mut stream).await, AnswerEvent::End(_)));
}

#[tokio::test]
async fn a_client_that_leaves_does_not_stop_the_function() {
    let (done, ended) = oneshot::channel();
    let stream = streamed(move |sender| {
        sender.begin(None);
        for _ in 0..100 {
            sender.part(b"a".to_vec(), Instant::now() + LATER);
        }
        done.send(sender.is_complete()).unwrap();
    })
    .await;
    drop(stream);
    assert!(!ended.await.unwrap());
}

#[tokio::test]
async fn a_client_that_does_not_read_in_time_loses_the_answer() {
    let (done, ended) = oneshot::channel();
    let mut stream = streamed(move |sender| {
        sender.begin(None);
        let deadline = Instant::now();
        for part in [b"a", b"b", b"c"] {
            sender.part(part.to_vec(), deadline);
        }
        done.send(()).unwrap();
    })
    .await;
    ended.await.unwrap();
    // The first part has room, the second has none, and the third must not follow the gap.
    let first = next(&mut stream).await;
    assert!(matches!(&first, AnswerEvent::Part(part) if part == b"a"), "{first:?}");
    let second = next(&mut stream).await;
    assert!(matches!(second, AnswerEvent::Lost), "{second:?}");
}
