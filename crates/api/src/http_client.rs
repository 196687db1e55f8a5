//! A client of HTTP/1.1 without TLS, for the trace exporter and the status client.

use std::error::Error;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::time::timeout;

/// Time limit of an exchange.
const LIMIT: Duration = Duration::from_secs(10);

/// The largest answer, bytes.
const MAX_ANSWER: usize = 16 << 20;

/// An HTTP client that reuses its connections.
#[derive(Debug, Clone)]
pub(crate) struct HttpClient(Client<HttpConnector, Full<Bytes>>);

impl HttpClient {
    pub(crate) fn new() -> Self {
        Self(Client::builder(TokioExecutor::new()).build_http())
    }

    /// Sends a request and reads the complete answer.
    pub(crate) async fn send(
        &self,
        request: Request<Bytes>,
    ) -> Result<Response<Bytes>, Box<dyn Error + Send + Sync>> {
        let exchange = async {
            let (head, body) = self.0.request(request.map(Full::new)).await?.into_parts();
            let body = Limited::new(body, MAX_ANSWER).collect().await?.to_bytes();
            Ok(Response::from_parts(head, body))
        };
        timeout(LIMIT, exchange).await?
    }
}
