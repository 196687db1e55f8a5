//! Exports spans to an OpenTelemetry collector: OTLP over HTTP.

use std::pin::Pin;

use axum::body::Bytes;
use axum::http::{Request, Response};
use opentelemetry_http::HttpError;
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig, WithHttpConfig};
use tokio::runtime::Handle;

use crate::http_client::HttpClient;

/// The path for spans, below the collector's endpoint (OTLP specification, "OTLP/HTTP request").
const TRACES: &str = "v1/traces";

/// Spans cannot be exported.
#[derive(Debug, thiserror::Error)]
#[error("cannot export spans to {endpoint}; the form of an endpoint is http://127.0.0.1:4318")]
pub struct OtlpError {
    endpoint: String,
    source: ExporterBuildError,
}

/// Sends requests on the daemon's runtime, because the SDK's thread has no runtime.
#[derive(Debug)]
struct OnRuntime {
    client: HttpClient,
    runtime: Handle,
}

impl opentelemetry_http::HttpClient for OnRuntime {
    // The expansion of an `async fn` by `async_trait`, which the trait uses.
    fn send_bytes<'life0, 'async_trait>(
        &'life0 self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        let client = self.client.clone();
        let sending = self.runtime.spawn(async move { client.send(request).await });
        Box::pin(async move { sending.await? })
    }
}

/// An exporter to the collector at `endpoint`, a URL. Must run inside a Tokio runtime.
pub(crate) fn exporter(endpoint: &str) -> Result<SpanExporter, OtlpError> {
    let client = OnRuntime { client: HttpClient::new(), runtime: Handle::current() };
    SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_endpoint(format!("{}/{TRACES}", endpoint.trim_end_matches('/')))
        .build()
        .map_err(|source| OtlpError { endpoint: endpoint.to_owned(), source })
}

#[cfg(test)]
#[path = "otlp_tests.rs"]
mod tests;
