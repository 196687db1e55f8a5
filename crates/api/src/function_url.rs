//! Serves the URLs of functions: an HTTP request becomes an event, and the function's answer an
//! HTTP response.
//!
//! Source: AWS, "Invoking Lambda function URLs", the request and response payload format 2.0.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::Query;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
    ACCESS_CONTROL_REQUEST_METHOD, CONTENT_TYPE, COOKIE, HOST, ORIGIN, SET_COOKIE, USER_AGENT,
    VARY,
};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_control::{Control, Cors, Hold, InvocationRequest, TraceContext, UrlRequest};
use serde::Deserialize;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::macros::format_description;
use uuid::Uuid;

use crate::lambda::{ApiError, REQUEST_ID, Scope};
use crate::server::Source;
use crate::url_stream;

/// The second label of the host of every URL.
pub(crate) const LABEL: &str = "lambda-url";

/// The id in the host of a request, if that is the host of a URL.
pub(crate) fn id_of<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    let host = match uri.host() {
        Some(host) => host,
        None => headers.get(HOST)?.to_str().ok()?,
    };
    let mut labels = host.split('.');
    let id = labels.next()?;
    (labels.next() == Some(LABEL) && id.len() == 32).then_some(id)
}

/// The URL that a request is for. `None` if its host is not that of a URL.
pub(crate) async fn find(
    control: &Arc<Control>,
    parts: &Parts,
) -> Result<Option<UrlRequest>, ApiError> {
    let Some(id) = id_of(&parts.uri, &parts.headers) else { return Ok(None) };
    match control.url_of(id).await {
        Ok(Some(found)) => Ok(Some(found)),
        Ok(None) => Err(ApiError::forbidden()),
        Err(error) => Err(ApiError::service(&error, "the daemon's database failed")),
    }
}

/// Whether a request has to be signed. Fails if nothing allows a request without a signature.
pub(crate) fn is_signed(url: &UrlRequest, parts: &Parts) -> Result<bool, ApiError> {
    if is_preflight(url, parts) {
        return Ok(false);
    }
    if url.url.signed || url.public { Ok(url.url.signed) } else { Err(ApiError::forbidden()) }
}

/// Whether a browser asks what it may send. The answer has no effect, and needs no permission.
fn is_preflight(url: &UrlRequest, parts: &Parts) -> bool {
    url.url.cors.is_some()
        && parts.method == Method::OPTIONS
        && parts.headers.contains_key(ORIGIN)
        && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

/// A request to a URL, with its body.
pub(crate) struct Call<'a> {
    pub(crate) control: &'a Arc<Control>,
    pub(crate) scope: &'a Scope,
    pub(crate) url: UrlRequest,
    /// The tenant that has signed.
    pub(crate) tenant: Option<String>,
    pub(crate) parts: Parts,
    pub(crate) body: Bytes,
    pub(crate) received: Instant,
    /// Held while the request's bytes are used.
    pub(crate) hold: Hold,
}

impl Call<'_> {
    /// Serves the request.
    pub(crate) async fn serve(self) -> Response {
        let origin = self.parts.headers.get(ORIGIN).cloned();
        let cors = self.url.url.cors.clone();
        let preflight = is_preflight(&self.url, &self.parts);
        let mut response = match preflight {
            true => StatusCode::OK.into_response(),
            false => self.invoke().await.unwrap_or_else(IntoResponse::into_response),
        };
        if let (Some(cors), Some(origin)) = (cors, origin) {
            allow(&cors, &origin, preflight, response.headers_mut());
        }
        response
    }

    async fn invoke(self) -> Result<Response, ApiError> {
        let request_id = Uuid::new_v4().to_string();
        let event = event(&self, &request_id).to_string().into_bytes();
        let field = |name: &str| {
            self.parts.headers.get(name).and_then(|value| Some(value.to_str().ok()?.to_owned()))
        };
        let request = InvocationRequest {
            function_arn: self.scope.arn_of(&self.url.target).to_string(),
            target: self.url.target.of_tenant(self.tenant),
            event,
            client_context: None,
            trace_id: field("x-amzn-trace-id"),
            trace: TraceContext::read(field),
            received: self.received,
            hold: self.hold,
        };
        let prepared = self.control.prepare(request).await;
        let prepared = prepared.map_err(|error| ApiError::not_prepared(error, self.scope))?;
        let mut response = match self.url.url.stream {
            true => url_stream::respond(self.control.stream(prepared).await).await?,
            false => match self.control.invoke(prepared).await.outcome.map_err(ApiError::from)? {
                Ok(answer) => response(&answer.payload).unwrap_or_else(bad_gateway),
                Err(_) => bad_gateway(),
            },
        };
        if let Ok(id) = HeaderValue::from_str(&request_id) {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        Ok(response)
    }
}

/// The function failed, or its answer is not valid.
pub(crate) fn bad_gateway() -> Response {
    (StatusCode::BAD_GATEWAY, Json(json!({ "Message": "Internal Server Error" }))).into_response()
}

/// The event of a request.
fn event(call: &Call<'_>, request_id: &str) -> Value {
    let Call { scope, url, tenant, parts, body, .. } = call;
    let mut headers: BTreeMap<&str, String> = BTreeMap::new();
    let mut cookies = Vec::new();
    for (name, value) in &parts.headers {
        let value = String::from_utf8_lossy(value.as_bytes());
        if name == COOKIE {
            cookies.extend(value.split("; ").map(ToOwned::to_owned));
            continue;
        }
        join(&mut headers, name.as_str(), &value);
    }
    let mut query: BTreeMap<String, String> = BTreeMap::new();
    let pairs = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri);
    for (name, value) in pairs.map(|Query(pairs)| pairs).unwrap_or_default() {
        join(&mut query, name, &value);
    }
    let source = parts.extensions.get::<Source>().and_then(|source| source.0);
    let now = OffsetDateTime::now_utc();
    let form =
        format_description!("[day]/[month repr:short]/[year]:[hour]:[minute]:[second] +0000");
    let host = headers.get("host").cloned().unwrap_or_default();
    let text = |name: HeaderName| headers.get(name.as_str()).cloned().unwrap_or_default();
    let account = if url.url.signed { scope.account.as_str() } else { "anonymous" };
    let mut event = json!({
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": parts.uri.path(),
        "rawQueryString": parts.uri.query().unwrap_or_default(),
        "headers": headers,
        "requestContext": {
            "accountId": account,
            "apiId": url.url.id,
            "domainName": host.split(':').next(),
            "domainPrefix": url.url.id,
            "http": {
                "method": parts.method.as_str(),
                "path": parts.uri.path(),
                "protocol": "HTTP/1.1",
                "sourceIp": source,
                "userAgent": text(USER_AGENT),
            },
            "requestId": request_id,
            "routeKey": "$default",
            "stage": "$default",
            // Formatting fails only for years outside 0 to 9999.
            "time": now.format(form).unwrap_or_default(),
            "timeEpoch": now.unix_timestamp_nanos() / 1_000_000,
        },
        "isBase64Encoded": false,
    });
    if let Some(tenant) = tenant {
        event["requestContext"]["authorizer"] = json!({ "iam": {
            "accountId": scope.account,
            "callerId": tenant,
            "userId": tenant,
            "userArn": format!("arn:aws:iam::{}:user/{tenant}", scope.account),
        } });
    }
    if !cookies.is_empty() {
        event["cookies"] = json!(cookies);
    }
    if !query.is_empty() {
        event["queryStringParameters"] = json!(query);
    }
    if !body.is_empty() {
        match std::str::from_utf8(body) {
            Ok(plain) if is_text(&text(CONTENT_TYPE)) => event["body"] = json!(plain),
            _ => {
                event["body"] = json!(STANDARD.encode(body));
                event["isBase64Encoded"] = json!(true);
            }
        }
    }
    event
}

/// Adds a value; values of one name are separated by commas.
fn join<K: Ord>(values: &mut BTreeMap<K, String>, name: K, value: &str) {
    let entry = values.entry(name);
    entry
        .and_modify(|all| {
            all.push(',');
            all.push_str(value);
        })
        .or_insert_with(|| value.to_owned());
}

/// Whether a body of this type is in the event as text.
fn is_text(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind.is_empty()
        || kind.starts_with("text/")
        || ["application/json", "application/javascript", "application/xml"].contains(&&*kind)
        || kind.ends_with("+json")
        || kind.ends_with("+xml")
}

/// A function's answer with a status.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    #[serde(flatten)]
    head: Head,
    body: Option<String>,
    #[serde(default)]
    is_base64_encoded: bool,
}

/// What a function's answer states of the response besides its body.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Head {
    #[serde(default = "ok")]
    status_code: u16,
    #[serde(default)]
    headers: Option<BTreeMap<String, Value>>,
    #[serde(default)]
    cookies: Option<Vec<String>>,
}

fn ok() -> u16 {
    StatusCode::OK.as_u16()
}

/// The response that a function's answer describes. `None` if it is not valid.
fn response(json: &[u8]) -> Option<Response> {
    let parsed: Value = serde_json::from_slice(json).ok()?;
    if parsed.get("statusCode").is_none() {
        return Some(([(CONTENT_TYPE, "application/json")], json.to_owned()).into_response());
    }
    let answer: Answer = serde_json::from_value(parsed).ok()?;
    let body = answer.body.unwrap_or_default();
    let body = match answer.is_base64_encoded {
        true => STANDARD.decode(body).ok()?,
        false => body.into_bytes(),
    };
    let mut response = body.into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer.head.apply(&mut response)?;
    Some(response)
}

impl Head {
    /// Gives a response the status, the headers and the cookies. `None` if one is not valid.
    pub(crate) fn apply(self, response: &mut Response) -> Option<()> {
        *response.status_mut() = StatusCode::from_u16(self.status_code).ok()?;
        let headers = response.headers_mut();
        for (name, value) in self.headers.unwrap_or_default() {
            let value = match value {
                Value::String(text) => text,
                Value::Number(_) | Value::Bool(_) => value.to_string(),
                _ => return None,
            };
            let name = HeaderName::try_from(name).ok()?;
            // The connection's own headers are the server's.
            if !["connection", "content-length", "transfer-encoding"].contains(&name.as_str()) {
                headers.insert(name, HeaderValue::try_from(value).ok()?);
            }
        }
        for cookie in self.cookies.unwrap_or_default() {
            headers.append(SET_COOKIE, HeaderValue::try_from(cookie).ok()?);
        }
        Some(())
    }
}

/// Adds what a page of `origin` may do, in place of the function's own headers.
fn allow(cors: &Cors, origin: &HeaderValue, preflight: bool, headers: &mut HeaderMap) {
    for name in [
        ACCESS_CONTROL_ALLOW_ORIGIN,
        ACCESS_CONTROL_ALLOW_CREDENTIALS,
        ACCESS_CONTROL_ALLOW_HEADERS,
        ACCESS_CONTROL_ALLOW_METHODS,
        ACCESS_CONTROL_EXPOSE_HEADERS,
        ACCESS_CONTROL_MAX_AGE,
    ] {
        headers.remove(name);
    }
    headers.append(VARY, HeaderValue::from_static("Origin"));
    let origins = cors.allow_origins.as_deref().unwrap_or_default();
    let allowed = |own: &String| own == "*" || own.as_bytes() == origin.as_bytes();
    if !origins.iter().any(allowed) {
        return;
    }
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    if cors.allow_credentials == Some(true) {
        headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
    }
    let mut list = |name: HeaderName, values: &Option<Vec<String>>| {
        let text = values.as_deref().unwrap_or_default().join(",");
        if let Ok(value) = HeaderValue::try_from(text)
            && !value.is_empty()
        {
            headers.insert(name, value);
        }
    };
    if !preflight {
        list(ACCESS_CONTROL_EXPOSE_HEADERS, &cors.expose_headers);
        return;
    }
    list(ACCESS_CONTROL_ALLOW_METHODS, &cors.allow_methods);
    list(ACCESS_CONTROL_ALLOW_HEADERS, &cors.allow_headers);
    if let Some(age) = cors.max_age {
        headers.insert(ACCESS_CONTROL_MAX_AGE, age.into());
    }
}

#[cfg(test)]
#[path = "function_url_tests.rs"]
mod tests;
