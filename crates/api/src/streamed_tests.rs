use axum::Router;
use axum::routing::get;
use firn_control::{InvocationReport, InvokeFailure, Invoked, Served};
use firn_run::{Answer, Failed, FunctionError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot, watch};

use super::*;
use crate::server::{self, Limits, Listen, Listener};

/// How a function ends.
#[derive(Clone, Copy)]
pub(crate) enum Ending {
    Answered,
    Failed,
    Restore,
    Lost,
}

pub(crate) fn served(ending: Ending) -> Served {
    let error = FunctionError {
        error_type: "E".into(),
        error_message: "m".into(),
        ..FunctionError::default()
    };
    let outcome = match ending {
        Ending::Answered | Ending::Lost => Ok(Ok(Answer {
            payload: b"null".to_vec(),
            duration: std::time::Duration::ZERO,
            logs: String::new(),
            max_memory: 0,
        })),
        Ending::Failed => Ok(Err(Failed::new(error, String::new()))),
        Ending::Restore => Err(InvokeFailure::Restore(error)),
    };
    let invoked = Invoked { outcome, report: InvocationReport::default(), log: "log".into() };
    Served { invoked, complete: !matches!(ending, Ending::Lost) }
}

/// An answer with these parts, of a function that ends then.
pub(crate) fn stream_of(kind: Option<&str>, parts: &[&[u8]], ending: Ending) -> AnswerStream {
    let (sender, receiver) = mpsc::channel(1);
    let parts: Vec<_> = parts.iter().map(|part| part.to_vec()).collect();
    let task = tokio::spawn(async move {
        for part in parts {
            sender.send(part).await.unwrap();
        }
        served(ending)
    });
    AnswerStream::new(kind.map(ToOwned::to_owned), receiver, task)
}

fn plain(event: AnswerEvent) -> Result<Bytes, CutOff> {
    match event {
        AnswerEvent::Part(part) => Ok(part.into()),
        AnswerEvent::End(_) => Ok(Bytes::new()),
        AnswerEvent::Lost => Err(CutOff),
    }
}

/// The body of a response, and whether it has an end.
pub(crate) async fn read(response: Response) -> (Vec<u8>, bool) {
    use http_body_util::BodyExt;
    let (mut body, mut bytes) = (response.into_body(), Vec::new());
    loop {
        match body.frame().await {
            Some(Ok(frame)) => bytes.extend(frame.into_data().unwrap()),
            Some(Err(_)) => return (bytes, false),
            None => return (bytes, true),
        }
    }
}

#[tokio::test]
async fn a_body_has_the_parts_of_the_stream() {
    for (ending, whole) in [(Ending::Answered, true), (Ending::Lost, false)] {
        let stream = stream_of(None, &[b"b", b"c"], ending);
        let response = respond(Bytes::from("a"), stream, plain);
        assert!(response.extensions().get::<Streaming>().is_some());
        assert_eq!(read(response).await, (b"abc".to_vec(), whole));
    }
}

/// The function waits for the test after its first part, and the client has this part meanwhile.
#[tokio::test]
async fn a_client_reads_the_first_part_before_the_function_ends() {
    let (sender, receiver) = mpsc::channel(1);
    let (go, wait) = oneshot::channel();
    let task = tokio::spawn(async move {
        sender.send(b"first".to_vec()).await.unwrap();
        wait.await.unwrap();
        sender.send(b"second".to_vec()).await.unwrap();
        served(Ending::Answered)
    });
    let stream = std::sync::Mutex::new(Some(AnswerStream::new(None, receiver, task)));
    let stream = std::sync::Arc::new(stream);
    let handler =
        move || async move { respond(Bytes::new(), stream.lock().unwrap().take().unwrap(), plain) };
    let listen = Listen::Tcp(([127, 0, 0, 1], 0).into());
    let listener = Listener::bind(&listen).await.unwrap();
    let Listen::Tcp(address) = listener.address().unwrap() else { unreachable!() };
    let (stop, stopped) = watch::channel(false);
    let routes = Router::new().route("/", get(handler));
    let server =
        tokio::spawn(
            async move { server::run(listener, routes, &Limits::default(), stopped).await },
        );
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut read = async |until: &str| {
        let mut text = String::new();
        while !text.ends_with(until) {
            text.push(client.read_u8().await.unwrap().into());
        }
        text
    };
    let head = read("\r\n\r\n").await;
    assert!(head.contains("transfer-encoding: chunked"), "{head}");
    assert_eq!(read("first\r\n").await, "5\r\nfirst\r\n");
    go.send(()).unwrap();
    assert_eq!(read("0\r\n\r\n").await, "6\r\nsecond\r\n0\r\n\r\n");
    drop((client, stop));
    server.await.unwrap();
}
