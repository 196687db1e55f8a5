//! Reads the bodies of requests.

use axum::body::{Body, Bytes, to_bytes};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_control::MAX_ZIP;
use serde::de::DeserializeOwned;

use super::ApiError;
use super::documents::FunctionCode;

/// The largest body of any request, bytes: the largest zip file in base64, and the rest of the
/// document.
pub(crate) const MAX_BODY: usize = MAX_ZIP.div_ceil(3) * 4 + (64 << 10);

/// The largest body of a request without code, bytes.
pub(super) const MAX_DOCUMENT: usize = 64 << 10;

/// Reads a body of at most `limit` bytes.
pub(super) async fn read(body: Body, limit: usize, operation: &str) -> Result<Bytes, ApiError> {
    // A truncated body gives the same error as a long one, but then no client reads the answer.
    to_bytes(body, limit).await.map_err(|_| ApiError::too_large(limit, operation))
}

/// Reads a JSON document of at most `limit` bytes.
pub(super) async fn json<T: DeserializeOwned>(
    body: Body,
    limit: usize,
    operation: &str,
) -> Result<T, ApiError> {
    parse(&read(body, limit, operation).await?)
}

/// Parses a JSON document.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| ApiError::not_json(&error))
}

/// Decodes the zip file of a request.
pub(super) async fn zip_file(code: FunctionCode) -> Result<Vec<u8>, ApiError> {
    if code.s3_bucket.is_some() || code.image_uri.is_some() {
        return Err(ApiError::invalid("this daemon accepts code only as ZipFile"));
    }
    let Some(text) = code.zip_file else {
        return Err(ApiError::invalid("Please provide a source for function code."));
    };
    // Decoding 50 MiB takes too long for a thread that serves other requests.
    let decoded = tokio::task::spawn_blocking(move || STANDARD.decode(text)).await;
    let decoded = decoded.map_err(|error| ApiError::service(&error, "a task of the daemon failed"));
    let zip = decoded?.map_err(|error| {
        ApiError::request_content(format!("Could not parse request body: ZipFile: {error}"))
    })?;
    if zip.len() > MAX_ZIP {
        let message = format!("Zipped size must be smaller than {MAX_ZIP} bytes");
        return Err(ApiError::invalid(message));
    }
    Ok(zip)
}
