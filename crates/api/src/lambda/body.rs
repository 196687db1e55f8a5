//! Reads the documents in requests.

use std::borrow::Cow;

use axum::body::Bytes;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_control::MAX_ZIP;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::authorize::Share;
use super::{ApiError, Lambda};

/// The largest body of any request, bytes: the largest zip file in base64, and the rest of the
/// document.
pub(crate) const MAX_BODY: usize = MAX_ZIP.div_ceil(3) * 4 + MAX_DOCUMENT;

/// The largest document of a request without its zip file, bytes. What a parsed document takes is a
/// small multiple of it.
pub(super) const MAX_DOCUMENT: usize = 64 << 10;

/// Parses a JSON document.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| ApiError::not_json(&error))
}

/// A request with a zip file.
pub(super) struct WithCode<T> {
    pub(super) request: T,
    /// The zip file, or why there is none.
    pub(super) zip: Result<Vec<u8>, ApiError>,
    /// Has to live as long as the zip file: the request's share of the buffer, and one of the
    /// permits to decode.
    pub(super) hold: firn_control::Hold,
}

/// The place of the zip file in a document. Parsing it copies nothing.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Zip<'a> {
    #[serde(borrow)]
    zip_file: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Outer<'a> {
    #[serde(borrow, alias = "Content")]
    code: Zip<'a>,
}

/// Where a document has its zip file.
#[derive(Clone, Copy)]
pub(super) enum ZipPlace {
    /// `ZipFile`
    Top,
    /// `Code.ZipFile`
    Code,
    /// `Content.ZipFile`
    Content,
}

impl Lambda {
    /// Parses a document and decodes its zip file, on a thread for it, a few at a time.
    pub(super) async fn with_code<T: DeserializeOwned + Send + 'static>(
        &self,
        body: Bytes,
        Share(share): Share,
        place: ZipPlace,
        operation: &'static str,
    ) -> Result<WithCode<T>, ApiError> {
        let permit = std::sync::Arc::clone(&self.decoders).acquire_owned().await;
        let permit = permit.map_err(|error| ApiError::service(&error, "the daemon stops"))?;
        let hold: firn_control::Hold = Some(Box::new((share, permit)));
        let decoded = tokio::task::spawn_blocking(move || {
            let raw = match place {
                ZipPlace::Top => serde_json::from_slice::<Zip<'_>>(&body),
                ZipPlace::Code | ZipPlace::Content => {
                    serde_json::from_slice(&body).map(|outer: Outer<'_>| outer.code)
                }
            };
            let raw = raw.map_err(|error| ApiError::not_json(&error))?.zip_file;
            if body.len() - raw.map_or(0, |raw| raw.get().len()) > MAX_DOCUMENT {
                return Err(ApiError::too_large(MAX_DOCUMENT, operation));
            }
            let request = parse(&body)?;
            Ok(WithCode { request, zip: decode(raw), hold })
        });
        decoded.await.map_err(|error| ApiError::service(&error, "a task of the daemon failed"))?
    }
}

fn decode(raw: Option<&RawValue>) -> Result<Vec<u8>, ApiError> {
    let Some(raw) = raw.map(RawValue::get) else {
        return Err(ApiError::invalid("Please provide a source for function code."));
    };
    let refused = |error: &dyn std::fmt::Display| {
        ApiError::request_content(format!("Could not parse request body: ZipFile: {error}"))
    };
    let plain = raw.strip_prefix('"').and_then(|raw| raw.strip_suffix('"'));
    let text = match plain.filter(|text| !text.contains('\\')) {
        Some(text) => Cow::Borrowed(text),
        None => Cow::Owned(serde_json::from_str::<String>(raw).map_err(|error| refused(&error))?),
    };
    let zip = STANDARD.decode(text.as_bytes()).map_err(|error| refused(&error))?;
    if zip.len() > MAX_ZIP {
        let message = format!("Zipped size must be smaller than {MAX_ZIP} bytes");
        return Err(ApiError::invalid(message));
    }
    Ok(zip)
}
