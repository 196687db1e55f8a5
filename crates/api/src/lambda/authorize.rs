//! What every request passes, in this order: the check of where it comes from, the check of its
//! head's signature, the reading of its body within the limits, and the check of the body's digest.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::{CONTENT_TYPE, HOST, ORIGIN};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use firn_agent::protocol::MAX_EVENT_BYTES;
use firn_control::{Control, Hold, UrlRequest};
use http_body_util::BodyExt;
use tokio::time::timeout;
use uuid::Uuid;

use super::body::{MAX_BODY, MAX_DOCUMENT};
use super::{ApiError, REQUEST_ID, Scope, once, unknown};
use crate::credentials::Credentials;
use crate::function_url::{self, Call};
use crate::server::{Buffer, Held, Limits, Peer, paced};
use crate::sigv4::{self, Checked, Payload};
use crate::streamed::{STREAM_BUFFER, Streaming};
use crate::sts;

/// The content types with which a browser sends a request to a foreign host without asking it.
const SIMPLE_TYPES: [&str; 3] =
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"];

/// When a request's head arrived.
#[derive(Debug, Clone, Copy)]
pub(super) struct Received(pub(super) Instant);

/// The tenant that has signed a request. `None` where requests are not signed.
#[derive(Debug, Clone)]
pub(crate) struct Caller(pub(crate) Option<String>);

/// The signature of a request that takes effect once.
#[derive(Debug, Clone)]
struct Signed(String);

/// A request's share of the buffer.
#[derive(Debug, Clone)]
pub(super) struct Share(pub(super) Arc<Held>);

/// What requests have to satisfy.
#[derive(Debug)]
pub(crate) struct Admission {
    /// The keys of clients, and the region that they sign for.
    pub(crate) credentials: Option<(Credentials, String)>,
    /// The names of this host, besides the loopback addresses. `None` accepts any.
    pub(crate) hosts: Option<Vec<String>>,
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) limits: Limits,
    pub(crate) scope: Scope,
    pub(crate) control: Arc<Control>,
}

/// What the checks have found out about a request.
struct Admitted {
    body: Bytes,
    share: Share,
    checked: Option<Checked>,
    /// The function's URL that it is for.
    url: Option<UrlRequest>,
}

/// Adds the checks of [`Admission`], and the errors for unknown paths.
pub(crate) fn with_admission(routes: Router, admission: Admission) -> Router {
    routes
        .fallback(unknown)
        .method_not_allowed_fallback(unknown)
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(Arc::new(admission), pass))
}

async fn pass(State(admission): State<Arc<Admission>>, request: Request, next: Next) -> Response {
    let received = Instant::now();
    let peer = request.extensions().get::<Arc<Peer>>().cloned();
    let to_url = function_url::id_of(request.uri(), request.headers()).is_some();
    let to_sts = !to_url && sts::is_request(request.method(), request.uri());
    let mut response = match admission.admit(request, peer.as_ref()).await {
        Ok(mut request) => {
            if let Some(peer) = &peer {
                peer.serves();
            }
            request.extensions_mut().insert(Received(received));
            let url = request.extensions_mut().remove::<UrlRequest>();
            let signed = request.extensions_mut().remove::<Signed>();
            match (url, signed) {
                (Some(url), _) => admission.call(url, request, received).await,
                (None, Some(Signed(signature))) => {
                    once::serve(&admission.control, signature, request, next).await
                }
                (None, None) => next.run(request).await,
            }
        }
        Err(error) if to_sts => sts::refuse(error),
        Err(error) => error.into_response(),
    };
    if let Some(peer) = &peer {
        // The answer counts until the client's next request. A function that streams it is not
        // stopped for another request.
        let streams = response.extensions_mut().remove::<Streaming>().is_some();
        let held = admission.buffer.hold(Some(peer).filter(|_| !streams));
        let whole = usize::try_from(response.body().size_hint().lower()).unwrap_or(usize::MAX);
        if held.grow(if streams { STREAM_BUFFER } else { whole }).await.is_err() {
            response = ApiError::buffer_full().into_response();
        } else if streams {
            response = paced(response, peer, admission.limits.answer);
        }
        peer.answers(Some(held), admission.limits.answer);
    }
    let headers = response.headers_mut();
    if !headers.contains_key(REQUEST_ID)
        && let Ok(value) = HeaderValue::from_str(&Uuid::new_v4().to_string())
    {
        headers.insert(REQUEST_ID, value);
    }
    response
}

impl Admission {
    /// Checks a request and reads its body.
    async fn admit(&self, request: Request, peer: Option<&Arc<Peer>>) -> Result<Request, ApiError> {
        let (parts, mut body) = request.into_parts();
        match self.check(&parts, &mut body, peer).await {
            Ok(Admitted { body, share, checked, url }) => {
                let once = is_change(&parts);
                let mut request = Request::from_parts(parts, Body::from(body));
                request.extensions_mut().insert(share);
                if let Some(url) = url {
                    request.extensions_mut().insert(url);
                }
                if let Some(checked) = checked.as_ref().filter(|_| once) {
                    request.extensions_mut().insert(Signed(checked.signature()));
                }
                request.extensions_mut().insert(Caller(checked.map(Checked::into_tenant)));
                Ok(request)
            }
            Err(error) => {
                // Most clients read the answer only after they have sent the body. The time for the
                // answer bounds this.
                tokio::spawn(async move { while let Some(Ok(_)) = body.frame().await {} });
                Err(error)
            }
        }
    }

    async fn check(
        &self,
        parts: &Parts,
        body: &mut Body,
        peer: Option<&Arc<Peer>>,
    ) -> Result<Admitted, ApiError> {
        let url = function_url::find(&self.control, parts).await?;
        let (signed, service) = match &url {
            None => (true, sigv4::service(&parts.method, &parts.uri)),
            Some(url) => (function_url::is_signed(url, parts)?, sigv4::LAMBDA),
        };
        if url.is_none() {
            self.check_host(parts)?;
            check_page(parts, is_change(parts))?;
        } else if signed && self.credentials.is_none() {
            // Nothing else protects a URL against pages of other origins.
            return Err(ApiError::forbidden());
        }
        let now = SystemTime::now();
        let checked = match self.credentials.as_ref().filter(|_| signed) {
            Some((credentials, region)) => {
                Some(credentials.check_head(parts, region, service, now)?)
            }
            None => None,
        };
        let held = Arc::new(self.buffer.hold(peer));
        let limit = match &url {
            None => body_limit(parts),
            Some(_) => (MAX_EVENT_BYTES, ApiError::event_too_large()),
        };
        let bytes = self.read(body, limit, &held, peer).await?;
        held.keep();
        if let Some(checked) = &checked {
            checked.check(parts, &Payload::of(&bytes))?;
        }
        Ok(Admitted { body: bytes, share: Share(held), checked, url })
    }

    /// Serves a request to a function's URL.
    async fn call(&self, url: UrlRequest, request: Request, received: Instant) -> Response {
        let (parts, body) = request.into_parts();
        // It is in memory, so this does not fail.
        let body = body.collect().await.map(http_body_util::Collected::to_bytes);
        let tenant = parts.extensions.get::<Caller>().and_then(|caller| caller.0.clone());
        let hold: Hold = match parts.extensions.get::<Share>() {
            Some(Share(share)) => Some(Box::new(Arc::clone(share))),
            None => None,
        };
        let (control, scope, body) = (&self.control, &self.scope, body.unwrap_or_default());
        Call { control, scope, url, tenant, parts, body, received, hold }.serve().await
    }

    /// Refuses requests that a page in a browser sends after its host's name was changed to this
    /// host.
    fn check_host(&self, parts: &Parts) -> Result<(), ApiError> {
        let host = host_of(parts);
        if let Some(hosts) = &self.hosts
            && !is_own(host, hosts)
        {
            return Err(ApiError::foreign(format!(
                "requests for the host {host:?} are refused: use a loopback address, or start the daemon with --allow-host"
            )));
        }
        Ok(())
    }

    async fn read(
        &self,
        body: &mut Body,
        (limit, too_large): (usize, ApiError),
        held: &Held,
        peer: Option<&Arc<Peer>>,
    ) -> Result<Bytes, ApiError> {
        let announced = body.size_hint().exact().map(usize::try_from);
        let expected = announced.and_then(Result::ok).unwrap_or(limit);
        if announced.is_some() && expected > limit {
            return Err(too_large);
        }
        let allowed = self.limits.body_limit(expected);
        if let Some(peer) = peer {
            // Only closes a connection on which the answer below cannot be sent.
            peer.reads(allowed.saturating_mul(2));
        }
        let read = collect(body, limit, too_large, held);
        timeout(allowed, read).await.map_err(|_| ApiError::body_too_slow())?
    }
}

/// The host that a request names; empty if it names several or none.
fn host_of(parts: &Parts) -> &str {
    let named = parts.uri.authority().map(axum::http::uri::Authority::as_str);
    let mut sent = parts.headers.get_all(HOST).iter().map(HeaderValue::to_str);
    match (named, sent.next(), sent.next()) {
        (Some(host), _, _) | (None, Some(Ok(host)), None) => host,
        _ => "",
    }
}

/// Refuses requests of pages of other origins, and those that such a page may send if they change
/// something.
fn check_page(parts: &Parts, changes: bool) -> Result<(), ApiError> {
    if let Some(origin) = parts.headers.get(ORIGIN)
        && origin.to_str().ok().and_then(|origin| origin.strip_prefix("http://"))
            != Some(host_of(parts))
    {
        return Err(ApiError::foreign("requests of pages of other origins are refused"));
    }
    let kind = parts.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default().trim();
    let simple = SIMPLE_TYPES.iter().any(|simple| kind.eq_ignore_ascii_case(simple));
    if simple && changes {
        return Err(ApiError::content_type(kind));
    }
    Ok(())
}

async fn collect(
    body: &mut Body,
    limit: usize,
    too_large: ApiError,
    held: &Held,
) -> Result<Bytes, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|_| ApiError::request_content("the request's body was cut off"))?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            return Err(too_large);
        }
        held.grow(data.len()).await.map_err(|_| ApiError::buffer_full())?;
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.into())
}

/// Whether a request may change what the daemon stores.
fn is_change(parts: &Parts) -> bool {
    let reads = parts.method == Method::GET || sts::is_request(&parts.method, &parts.uri);
    !reads && !is_invocation(parts)
}

fn is_invocation(parts: &Parts) -> bool {
    let path = parts.uri.path();
    parts.method == Method::POST
        && (path.ends_with("/invocations") || path.ends_with("/response-streaming-invocations"))
}

/// The longest body of a request, bytes, and the error for a longer one.
fn body_limit(parts: &Parts) -> (usize, ApiError) {
    let path = parts.uri.path().trim_end_matches('/');
    let code = |operation| (MAX_BODY, ApiError::too_large(MAX_BODY, operation));
    match parts.method {
        Method::POST if is_invocation(parts) => (MAX_EVENT_BYTES, ApiError::event_too_large()),
        Method::POST if path.ends_with("/functions") => code("CreateFunction"),
        Method::PUT if path.ends_with("/code") => code("UpdateFunctionCode"),
        Method::POST if path.contains("/layers/") && path.ends_with("/versions") => {
            code("PublishLayerVersion")
        }
        _ => (MAX_DOCUMENT, ApiError::too_large(MAX_DOCUMENT, "this")),
    }
}

/// Whether a Host header names this host.
fn is_own(host: &str, names: &[String]) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    address.is_ok_and(|address| address.is_loopback())
        || name.eq_ignore_ascii_case("localhost")
        || names.iter().any(|own| own.eq_ignore_ascii_case(name))
}
