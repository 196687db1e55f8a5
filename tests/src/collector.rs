//! A minimal collector of OpenTelemetry spans.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;

/// Listens until the test's process exits.
#[derive(Debug)]
pub struct Collector {
    address: String,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    /// Starts to listen.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let spans = Arc::<Mutex<Vec<Span>>>::default();
        let kept = Arc::clone(&spans);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let received = request(stream.unwrap());
                let resources = received.resource_spans.into_iter();
                let scopes = resources.flat_map(|resource| resource.scope_spans);
                kept.lock().unwrap().extend(scopes.flat_map(|scope| scope.spans));
            }
        });
        Self { address, spans }
    }

    /// The endpoint for spans.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The spans received so far.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap().clone()
    }
}

/// Receives one request and replies to it.
fn request(stream: TcpStream) -> ExportTraceServiceRequest {
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert_eq!(line.trim_end(), "POST /v1/traces HTTP/1.1");
    while line != "\r\n" {
        line.clear();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "a request that is cut off");
        let lower = line.to_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let answer = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    reader.into_inner().write_all(answer.as_bytes()).unwrap();
    ExportTraceServiceRequest::decode(body.as_slice()).unwrap()
}
