//! HTTP requests of a guest (RFC 9112), which is hostile.

use httparse::{EMPTY_HEADER, Header, Status};

/// The most bytes of a request, with its headers and its content, which is ignored.
pub(super) const MAX_REQUEST: usize = 8 << 10;
/// The most headers of a request.
const MAX_HEADERS: usize = 64;

/// The scheme of a target in absolute form, which requests to a proxy have.
const SCHEME: &str = "http://";

/// What the bytes of a connection begin with.
#[derive(Debug)]
pub(super) enum Parsed {
    /// More bytes are needed.
    Partial,
    /// A request of so many bytes.
    Request(Request, usize),
    /// No request, for this reason.
    Invalid(&'static str),
}

/// A request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) method: String,
    /// The absolute path; empty if the target has none.
    pub(super) path: String,
    /// The token, if it has one.
    pub(super) token: Option<Vec<u8>>,
    /// The header for a new token's time to live, and its value.
    pub(super) ttl: Option<(String, Vec<u8>)>,
    /// Whether a proxy has forwarded it.
    pub(super) is_forwarded: bool,
    /// Whether JSON is accepted before text.
    pub(super) accepts_json: bool,
    /// Whether the connection ends after the answer.
    pub(super) closes: bool,
}

/// Parses the first request in `bytes`.
pub(super) fn parse(bytes: &[u8]) -> Parsed {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let len = match head.parse(bytes) {
        Ok(Status::Complete(len)) => len,
        Ok(Status::Partial) => return partial(bytes),
        Err(httparse::Error::TooManyHeaders) => return Parsed::Invalid("too many headers"),
        Err(_) => return Parsed::Invalid("not an HTTP request"),
    };
    let (Some(method), Some(target)) = (head.method, head.path) else {
        return Parsed::Invalid("not an HTTP request");
    };
    let mut request = Request {
        method: method.to_owned(),
        path: path_of(target).to_owned(),
        closes: head.version == Some(0),
        ..Request::default()
    };
    let mut content = None;
    for Header { name, value } in head.headers {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        if is("x-metadata-token") || is("x-aws-ec2-metadata-token") {
            request.token.get_or_insert(value.to_vec());
        } else if is("x-metadata-token-ttl-seconds") || is("x-aws-ec2-metadata-token-ttl-seconds") {
            request.ttl.get_or_insert(((*name).to_owned(), value.to_vec()));
        } else if is("x-forwarded-for") {
            request.is_forwarded = true;
        } else if is("accept") {
            request.accepts_json = accepts_json(value);
        } else if is("connection") {
            match () {
                () if has_token(value, "close") => request.closes = true,
                () if has_token(value, "keep-alive") => request.closes = false,
                () => {}
            }
        } else if is("content-length") {
            let Some(len) = number(value) else { return Parsed::Invalid("a wrong Content-Length") };
            if content.is_some_and(|content| content != len) {
                return Parsed::Invalid("two lengths of its content");
            }
            content = Some(len);
        } else if is("transfer-encoding") {
            return Parsed::Invalid("its content has no length");
        }
    }
    let len = len.saturating_add(content.unwrap_or(0));
    match bytes.len() {
        _ if len > MAX_REQUEST => Parsed::Invalid("too large"),
        found if found < len => Parsed::Partial,
        _ => Parsed::Request(request, len),
    }
}

fn partial(bytes: &[u8]) -> Parsed {
    if bytes.len() < MAX_REQUEST { Parsed::Partial } else { Parsed::Invalid("too large") }
}

/// The path of a target in origin form or in absolute form (RFC 9112, 3.2).
fn path_of(target: &str) -> &str {
    let path = match target.split_at_checked(SCHEME.len()) {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case(SCHEME) => {
            rest.find('/').map_or("", |at| &rest[at..])
        }
        _ => target,
    };
    if path.starts_with('/') { path } else { "" }
}

/// Whether the first type that the service has is JSON.
fn accepts_json(value: &[u8]) -> bool {
    let types = value.split(|byte| *byte == b',').map(|part| {
        let name = part.split(|byte| *byte == b';').next().unwrap_or_default();
        name.trim_ascii()
    });
    let mut known = types.filter_map(|name| match name {
        name if name.eq_ignore_ascii_case(b"application/json") => Some(true),
        name if name.eq_ignore_ascii_case(b"text/plain") || name == b"*/*" => Some(false),
        _ => None,
    });
    known.next().unwrap_or(false)
}

fn has_token(value: &[u8], token: &str) -> bool {
    let mut tokens = value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    tokens.any(|found| found.eq_ignore_ascii_case(token.as_bytes()))
}

/// Digits and nothing else.
pub(super) fn number(value: &[u8]) -> Option<usize> {
    let digits = str::from_utf8(value).ok()?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
