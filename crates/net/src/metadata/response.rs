//! HTTP responses to a guest.

use std::fmt::Write;

/// A status of HTTP (RFC 9110, 15).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    BadRequest,
    Unauthorized,
    NotFound,
    MethodNotAllowed,
    NotImplemented,
}

impl Status {
    const fn line(self) -> &'static str {
        match self {
            Self::Ok => "200 OK",
            Self::BadRequest => "400 Bad Request",
            Self::Unauthorized => "401 Unauthorized",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed",
            Self::NotImplemented => "501 Not Implemented",
        }
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Response {
    pub(super) status: Status,
    pub(super) content: String,
    pub(super) is_json: bool,
    /// A header of the request that is returned.
    pub(super) header: Option<(String, u32)>,
}

impl Response {
    /// Text.
    pub(super) fn text(status: Status, content: impl Into<String>) -> Self {
        Self { status, content: content.into(), is_json: false, header: None }
    }

    /// Its bytes. An answer to `HEAD` has the headers alone.
    pub(super) fn to_bytes(&self, is_head: bool, closes: bool) -> Vec<u8> {
        let connection = if closes { "close" } else { "keep-alive" };
        let kind = if self.is_json { "application/json" } else { "text/plain" };
        let mut head = format!(
            "HTTP/1.1 {}\r\nServer: firn\r\nConnection: {connection}\r\nContent-Type: {kind}\r\n\
             Content-Length: {}\r\n",
            self.status.line(),
            self.content.len()
        );
        // A string takes all that is written.
        if self.status == Status::MethodNotAllowed {
            let _ = head.write_str("Allow: GET, PUT\r\n");
        }
        if let Some((name, value)) = &self.header {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        let _ = head.write_str("\r\n");
        if !is_head {
            head.push_str(&self.content);
        }
        head.into_bytes()
    }
}
