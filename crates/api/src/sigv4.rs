//! Signatures of requests: AWS Signature Version 4.
//!
//! Source: AWS, "Signature Version 4 signing process". The digest of the payload is always computed
//! from the payload. Signatures in the query are not supported.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use axum::body::Bytes;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Method, Request, Uri};
use hmac::{Hmac, KeyInit, Mac};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use sha2::{Digest, Sha256};
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;
use time::{OffsetDateTime, PrimitiveDateTime};

use crate::credentials::{Credentials, Key};
use crate::sts;

const ALGORITHM: &str = "AWS4-HMAC-SHA256";

/// The service that requests to AWS Lambda's API are signed for.
pub(crate) const LAMBDA: &str = "lambda";

/// The header with the body's digest. Clients may leave it out.
const CONTENT_DIGEST: &str = "x-amz-content-sha256";

/// The format of x-amz-date.
const TIME: &[BorrowedFormatItem<'_>] =
    format_description!("[year][month][day]T[hour][minute][second]Z");

/// The largest difference between the clocks of client and daemon.
const SKEW: Duration = Duration::from_secs(15 * 60);

/// The escaped characters of a canonical path: all except the unreserved characters (RFC 3986) and
/// slashes.
const PATH: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// A request is not signed with one of the keys.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SignatureError {
    #[error("Missing Authentication Token")]
    Missing,
    #[error("The security token included in the request is invalid.")]
    UnknownKey,
    #[error("{0}")]
    Invalid(String),
}

/// The SHA-256 of a body, in hexadecimal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Payload(String);

/// A signature whose scope and headers are valid.
pub(crate) struct Checked {
    secret: String,
    tenant: String,
    time: String,
    region: String,
    service: &'static str,
    signed: Vec<String>,
    signature: Vec<u8>,
}

/// A signature in a request's headers.
struct Signature<'a> {
    key: &'a str,
    date: &'a str,
    region: &'a str,
    service: &'a str,
    headers: &'a str,
    signature: Vec<u8>,
}

impl Credentials {
    /// Checks everything in a request's head: that it names one of the keys, this daemon's
    /// `region`, the service and about `now`, and that all of it that matters is signed. If the
    /// head has the body's digest, checks the signature as well.
    pub(crate) fn check_head(
        &self,
        request: &Parts,
        region: &str,
        service: &'static str,
        now: SystemTime,
    ) -> Result<Checked, SignatureError> {
        let header = |name: &str| request.headers.get(name).and_then(|value| value.to_str().ok());
        let authorization = header("authorization").ok_or(SignatureError::Missing)?;
        let signature = Signature::parse(authorization)
            .ok_or_else(|| invalid("the Authorization header cannot be read"))?;
        let Key { secret, tenant } = self.key(signature.key).ok_or(SignatureError::UnknownKey)?;
        let time = header("x-amz-date").ok_or_else(|| invalid("x-amz-date is missing"))?;
        check_time(time, now)?;
        if (signature.date, signature.region, signature.service) != (&time[..8], region, service) {
            return Err(invalid(&format!(
                "Credential should be scoped to the date {}, the region {region} and the service {service}",
                &time[..8]
            )));
        }
        let signed: Vec<&str> = signature.headers.split(';').collect();
        let sent = request.headers.keys().map(HeaderName::as_str);
        let needed = sent.filter(|name| *name == "host" || name.starts_with("x-amz-"));
        if let Some(name) = needed.chain(["host"]).find(|name| !signed.contains(name)) {
            return Err(invalid(&format!("the header {name} must be signed")));
        }
        let checked = Checked {
            secret: secret.clone(),
            tenant: tenant.clone(),
            time: time.to_owned(),
            region: region.to_owned(),
            service,
            signed: signed.iter().map(|name| (*name).to_owned()).collect(),
            signature: signature.signature,
        };
        match header(CONTENT_DIGEST) {
            None => {}
            Some(digest) => checked.check(request, &Payload(digest.to_owned()))?,
        }
        Ok(checked)
    }

    /// Signs a request for `region` with the first key.
    pub(crate) fn sign(&self, request: &mut Request<Bytes>, region: &str, now: SystemTime) {
        self.sign_for(request, region, service(request.method(), request.uri()), now);
    }

    /// Signs a request for a service.
    pub(crate) fn sign_for(
        &self,
        request: &mut Request<Bytes>,
        region: &str,
        service: &str,
        now: SystemTime,
    ) {
        let Some((key, Key { secret, .. })) = self.first() else { return };
        // Formatting fails only for years outside 0 to 9999.
        let time = OffsetDateTime::from(now).format(TIME).unwrap_or_default();
        let host = request.uri().authority().map_or("", |authority| authority.as_str()).to_owned();
        let date = &time[..time.len().min(8)];
        let headers = request.headers_mut();
        for (name, value) in [("host", &host), ("x-amz-date", &time)] {
            if let Ok(value) = HeaderValue::from_str(value) {
                headers.insert(name, value);
            }
        }
        let signed = ["host", "x-amz-date"];
        let scope = [date, region, service, "aws4_request"];
        let (parts, body) = std::mem::take(request).into_parts();
        let canonical = canonical_request(&parts, &signed, &Payload::of(&body));
        let signature = hex(&mac_of(secret, &time, scope, &canonical).finalize().into_bytes());
        let (scope, signed) = (scope.join("/"), signed.join(";"));
        let value = format!(
            "{ALGORITHM} Credential={key}/{scope}, SignedHeaders={signed}, Signature={signature}"
        );
        *request = Request::from_parts(parts, body);
        // If the key is not valid in a header, the daemon refuses the request as unsigned.
        if let Ok(value) = HeaderValue::from_str(&value) {
            request.headers_mut().insert(AUTHORIZATION, value);
        }
    }
}

impl Payload {
    pub(crate) fn of(body: &[u8]) -> Self {
        Self(hex(&Sha256::digest(body)))
    }
}

impl Checked {
    /// The tenant whose key has signed.
    pub(crate) fn into_tenant(self) -> String {
        self.tenant
    }

    /// The signature, in hexadecimal.
    pub(crate) fn signature(&self) -> String {
        hex(&self.signature)
    }

    /// Checks that the request, whose body has this digest, has the signature.
    pub(crate) fn check(&self, request: &Parts, payload: &Payload) -> Result<(), SignatureError> {
        let signed: Vec<&str> = self.signed.iter().map(String::as_str).collect();
        let canonical = canonical_request(request, &signed, payload);
        let scope = [&self.time[..8], &self.region, self.service, "aws4_request"];
        // Compares in constant time.
        let mac = mac_of(&self.secret, &self.time, scope, &canonical);
        mac.verify_slice(&self.signature).map_err(|_| {
            invalid(
                "The request signature we calculated does not match the signature you provided. Check your AWS Secret \
                 Access Key and signing method.",
            )
        })
    }
}

/// The service that a request is signed for.
pub(crate) fn service(method: &Method, uri: &Uri) -> &'static str {
    if sts::is_request(method, uri) { sts::SERVICE } else { LAMBDA }
}

/// The authentication code of the text to sign, under the key that the secret gives for the scope.
fn mac_of(secret: &str, time: &str, scope: [&str; 4], canonical: &str) -> Hmac<Sha256> {
    let digest = hex(&Sha256::digest(canonical));
    let text = format!("{ALGORITHM}\n{time}\n{}\n{digest}", scope.join("/"));
    let mut key = format!("AWS4{secret}").into_bytes();
    for part in scope {
        key = mac(&key, part).finalize().into_bytes().to_vec();
    }
    mac(&key, &text)
}

impl<'a> Signature<'a> {
    fn parse(header: &'a str) -> Option<Self> {
        let rest = header.strip_prefix(ALGORITHM)?;
        let fields: HashMap<&str, &str> =
            rest.split(',').filter_map(|field| field.trim().split_once('=')).collect();
        let scope: Vec<&str> = fields.get("Credential")?.split('/').collect();
        let [key, date, region, service, "aws4_request"] = scope.as_slice() else { return None };
        let digits = fields.get("Signature")?.as_bytes();
        let bytes = digits.chunks(2).map(|pair| {
            u8::from_str_radix(std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?, 16)
                .ok()
        });
        Some(Self {
            key,
            date,
            region,
            service,
            headers: fields.get("SignedHeaders")?,
            signature: bytes.collect::<Option<_>>()?,
        })
    }
}

fn canonical_request(request: &Parts, signed: &[&str], payload: &Payload) -> String {
    // The path is already escaped on the wire. All services except S3 escape it twice.
    let path = utf8_percent_encode(request.uri.path(), PATH).to_string();
    let mut query: Vec<(&str, &str)> = request
        .uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .collect();
    query.sort_unstable();
    let query: Vec<String> = query.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mut headers = String::new();
    for name in signed {
        let values = request.headers.get_all(*name).iter().map(|value| {
            let text = String::from_utf8_lossy(value.as_bytes());
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        });
        headers.push_str(&format!("{name}:{}\n", values.collect::<Vec<_>>().join(",")));
    }
    format!(
        "{}\n{path}\n{}\n{headers}\n{}\n{}",
        request.method,
        query.join("&"),
        signed.join(";"),
        payload.0,
    )
}

fn check_time(text: &str, now: SystemTime) -> Result<(), SignatureError> {
    let time =
        PrimitiveDateTime::parse(text, TIME).map_err(|_| invalid("x-amz-date cannot be read"))?;
    let skew = (OffsetDateTime::from(now) - time.assume_utc()).unsigned_abs();
    if skew > SKEW {
        return Err(invalid(&format!(
            "Signature expired: {text} is {} s from now",
            skew.as_secs()
        )));
    }
    Ok(())
}

fn mac(key: &[u8], text: &str) -> Hmac<Sha256> {
    #[expect(clippy::expect_used, reason = "HMAC accepts keys of any length (RFC 2104)")]
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length");
    mac.update(text.as_bytes());
    mac
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn invalid(reason: &str) -> SignatureError {
    SignatureError::Invalid(reason.to_owned())
}

#[cfg(test)]
#[path = "sigv4_tests.rs"]
mod tests;
