//! What a metadata service answers.

use std::io;
use std::time::Instant;

use serde_json::Value;

use super::request::{Request, number};
use super::response::{Response, Status};
use super::token::{TTL_SECONDS, Tokens};
use super::{MetadataConfig, MetadataStore, MetadataVersion};

/// Where a guest gets its token.
const TOKEN_PATH: &str = "/latest/api/token";

/// The service of one guest.
#[derive(Debug)]
pub(crate) struct Service {
    config: MetadataConfig,
    store: MetadataStore,
    tokens: Tokens,
}

impl Service {
    /// A service whose tokens no other accepts.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub(crate) fn new(config: MetadataConfig, store: MetadataStore) -> io::Result<Self> {
        Ok(Self { config, store, tokens: Tokens::new()? })
    }

    pub(super) fn answer(&self, request: &Request, now: Instant) -> Response {
        if request.path.is_empty() {
            return Response::text(Status::BadRequest, "the request has no path");
        }
        match request.method.as_str() {
            "GET" => self.get(request, now),
            "PUT" => self.put(request, now),
            _ => Response::text(Status::MethodNotAllowed, "use GET or PUT"),
        }
    }

    fn get(&self, request: &Request, now: Instant) -> Response {
        if self.config.version == MetadataVersion::V2 {
            let unauthorized = |reason| Response::text(Status::Unauthorized, reason);
            let Some(token) = &request.token else {
                return unauthorized("there is no token: get one, and send it as X-metadata-token");
            };
            if !self.tokens.is_valid(token, now) {
                return unauthorized("the token is not valid, or has ended");
            }
        }
        let path = without_doubles(&request.path);
        let is_json = request.accepts_json && !self.config.imds_compat;
        let pointer = path.strip_suffix('/').unwrap_or(&path);
        let answer = |value: &Value| {
            let content = if is_json { Some(value.to_string()) } else { text_of(value) };
            content.map(|content| Response { is_json, ..Response::text(Status::Ok, content) })
        };
        match self.store.at(pointer, answer) {
            Some(Some(response)) => response,
            Some(None) => Response::text(
                Status::NotImplemented,
                "text is of objects and strings alone: use Accept: application/json",
            ),
            None => not_found(request),
        }
    }

    fn put(&self, request: &Request, now: Instant) -> Response {
        let bad = |reason: &str| Response::text(Status::BadRequest, reason);
        if request.is_forwarded {
            return bad("a request with X-Forwarded-For gets no token");
        }
        if without_doubles(&request.path) != TOKEN_PATH {
            return not_found(request);
        }
        let Some((name, value)) = &request.ttl else {
            return bad("there is no time to live: send X-metadata-token-ttl-seconds");
        };
        let seconds = number(value).and_then(|seconds| u32::try_from(seconds).ok());
        let Some(seconds) = seconds.filter(|seconds| TTL_SECONDS.contains(seconds)) else {
            return bad("the time to live is not 1 to 21600 seconds");
        };
        Response {
            header: Some((name.clone(), seconds)),
            ..Response::text(Status::Ok, self.tokens.issue(seconds, now))
        }
    }
}

fn not_found(request: &Request) -> Response {
    Response::text(Status::NotFound, format!("there is no {}", request.path))
}

/// A value as EC2's service has it: a string, or the names in an object, with a slash after those
/// of objects.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(object) => {
            let names = object.iter().map(|(name, value)| {
                let slash = if value.is_object() { "/" } else { "" };
                format!("{name}{slash}")
            });
            Some(names.collect::<Vec<_>>().join("\n"))
        }
        _ => None,
    }
}

/// A path with one slash where it has several.
fn without_doubles(path: &str) -> String {
    let mut single = String::with_capacity(path.len());
    for character in path.chars() {
        if character != '/' || !single.ends_with('/') {
            single.push(character);
        }
    }
    single
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
