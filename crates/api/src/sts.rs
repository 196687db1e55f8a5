//! GetCallerIdentity of AWS's Security Token Service, by which clients find out their account.
//!
//! Source: AWS, "Security Token Service API Reference", 2011-06-15. In its query protocol, a
//! request is a form that is posted to `/`, and answers and errors are XML.

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use serde::Deserialize;
use uuid::Uuid;

use crate::lambda::{ApiError, Caller, REQUEST_ID};

/// The service that its requests are signed for.
pub(crate) const SERVICE: &str = "sts";

const VERSION: &str = "2011-06-15";

/// The form's fields that every request has.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Form {
    action: String,
    version: String,
}

/// The service's route. Without credentials, clients are the root of `account`.
pub(crate) fn routes(account: String) -> Router {
    Router::new().route("/", post(serve)).with_state(account)
}

/// Whether a request is one of this service.
pub(crate) fn is_request(method: &Method, uri: &Uri) -> bool {
    method == Method::POST && uri.path() == "/"
}

async fn serve(
    State(account): State<String>,
    Extension(Caller(tenant)): Extension<Caller>,
    body: Bytes,
) -> Response {
    let form = format!("/?{}", String::from_utf8_lossy(&body)).parse::<Uri>();
    let form = form.ok().and_then(|uri| Query::<Form>::try_from_uri(&uri).ok());
    match form {
        Some(Query(form)) if form.action == "GetCallerIdentity" && form.version == VERSION => {
            let (id, name) = match tenant {
                Some(tenant) => (tenant.clone(), format!("user/{tenant}")),
                None => (account.clone(), "root".to_owned()),
            };
            let (id, name) = (escape(&id), escape(&name));
            answer(StatusCode::OK, |request| {
                format!(
                    "<GetCallerIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/{VERSION}/\">\
                     <GetCallerIdentityResult><Arn>arn:aws:iam::{account}:{name}</Arn><UserId>{id}</UserId>\
                     <Account>{account}</Account></GetCallerIdentityResult><ResponseMetadata>\
                     <RequestId>{request}</RequestId></ResponseMetadata></GetCallerIdentityResponse>"
                )
            })
        }
        Some(Query(Form { action, version })) => {
            refuse(ApiError::no_such_action(&action, &version))
        }
        None => refuse(ApiError::validation("the body is not a form with Action and Version")),
    }
}

/// The answer for a request that is refused.
pub(crate) fn refuse(error: ApiError) -> Response {
    let (status, code, message) = error.into_parts();
    let (side, message) =
        (if status.is_server_error() { "Receiver" } else { "Sender" }, escape(&message));
    answer(status, |request| {
        format!(
            "<ErrorResponse xmlns=\"https://sts.amazonaws.com/doc/{VERSION}/\"><Error><Type>{side}</Type>\
             <Code>{code}</Code><Message>{message}</Message></Error><RequestId>{request}</RequestId></ErrorResponse>"
        )
    })
}

/// An answer with the request's id.
fn answer(status: StatusCode, document: impl FnOnce(&str) -> String) -> Response {
    let request = Uuid::new_v4().to_string();
    let mut response = (status, document(&request)).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/xml"));
    if let Ok(request) = HeaderValue::from_str(&request) {
        headers.insert(REQUEST_ID, request);
    }
    response
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
#[path = "sts_tests.rs"]
mod tests;
