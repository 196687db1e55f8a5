//! Configuration of URLs that invoke functions. The module `function_url` serves them.

use axum::Json;
use axum::body::Bytes;
use axum::http::header::HOST;
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use firn_control::{Cors, FunctionUrl, LATEST, Target};
use serde::Deserialize;
use serde_json::{Value, json};

use super::ApiError;
use super::body::parse;
use super::extract::{Qualified, Unqualified};
use super::names::Scope;
use super::pages::page;
use super::settings::{self, Others};
use crate::function_url::LABEL;

/// The body of CreateFunctionUrlConfig and UpdateFunctionUrlConfig.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Request {
    auth_type: Option<String>,
    cors: Option<Cors>,
    invoke_mode: Option<String>,
    #[serde(flatten)]
    others: Others,
}

pub(super) async fn create(
    Qualified { lambda, target, .. }: Qualified,
    headers: HeaderMap,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    check_qualifier(&target)?;
    let Change { signed, stream, cors } = read(&body)?;
    let signed = signed.ok_or_else(|| ApiError::constraint("authType", "null", "not be null"))?;
    let created = lambda.control.create_url(&target, signed, stream == Some(true), cors).await;
    let created = created.map_err(lambda.error())?;
    let document = document(&lambda.scope, target.name(), target.qualifier(), &created, &headers);
    Ok((StatusCode::CREATED, Json(document)))
}

pub(super) async fn update(
    Qualified { lambda, target, .. }: Qualified,
    headers: HeaderMap,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let Change { signed, stream, cors } = read(&body)?;
    let changed = lambda.control.update_url(&target, signed, stream, cors).await;
    let changed = changed.map_err(lambda.error())?;
    Ok(Json(document(&lambda.scope, target.name(), target.qualifier(), &changed, &headers)))
}

pub(super) async fn get(
    Qualified { lambda, target, .. }: Qualified,
    headers: HeaderMap,
) -> Result<impl IntoResponse, ApiError> {
    let found = lambda.control.url(&target).await.map_err(lambda.error())?;
    Ok(Json(document(&lambda.scope, target.name(), target.qualifier(), &found, &headers)))
}

pub(super) async fn list(
    Unqualified { lambda, target, query, .. }: Unqualified,
    headers: HeaderMap,
) -> Result<impl IntoResponse, ApiError> {
    let urls = lambda.control.urls(&target).await.map_err(lambda.error())?;
    let items = urls.into_iter().map(|(qualifier, url)| {
        let document = document(&lambda.scope, target.name(), Some(&qualifier), &url, &headers);
        (qualifier, document)
    });
    let (configs, next) = page(items.collect(), &query)?;
    Ok(Json(json!({ "FunctionUrlConfigs": configs, "NextMarker": next })))
}

pub(super) async fn delete(
    Qualified { lambda, target, .. }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    lambda.control.delete_url(&target).await.map_err(lambda.error())?;
    Ok(StatusCode::NO_CONTENT)
}

/// URLs are for functions and aliases.
fn check_qualifier(target: &Target) -> Result<(), ApiError> {
    match target.qualifier() {
        Some(version) if version.bytes().all(|byte| byte.is_ascii_digit()) => {
            Err(ApiError::constraint("qualifier", version, "be $LATEST or an alias"))
        }
        _ => Ok(()),
    }
}

/// What a request sets of a URL.
struct Change {
    signed: Option<bool>,
    stream: Option<bool>,
    cors: Option<Cors>,
}

fn read(body: &[u8]) -> Result<Change, ApiError> {
    let request: Request = parse(body)?;
    settings::check(&request.others)?;
    let signed = match request.auth_type.as_deref() {
        None => None,
        Some("NONE") => Some(false),
        Some("AWS_IAM") => Some(true),
        Some(other) => return Err(ApiError::constraint("authType", other, "be NONE or AWS_IAM")),
    };
    let stream = match request.invoke_mode.as_deref() {
        None | Some("") => None,
        Some("BUFFERED") => Some(false),
        Some("RESPONSE_STREAM") => Some(true),
        Some(other) => {
            let rule = "be BUFFERED or RESPONSE_STREAM";
            return Err(ApiError::constraint("invokeMode", other, rule));
        }
    };
    if let Some(cors) = &request.cors {
        check_cors(cors)?;
    }
    Ok(Change { signed, stream, cors: request.cors })
}

fn check_cors(cors: &Cors) -> Result<(), ApiError> {
    let lists = [
        ("cors.allowHeaders", &cors.allow_headers, 100, 1024),
        ("cors.allowMethods", &cors.allow_methods, 6, 6),
        ("cors.allowOrigins", &cors.allow_origins, 100, 253),
        ("cors.exposeHeaders", &cors.expose_headers, 100, 1024),
    ];
    for (name, list, most, longest) in lists {
        let list = list.as_deref().unwrap_or_default();
        if list.len() > most {
            let rule = format!("have at most {most} members");
            return Err(ApiError::constraint(name, &list.len().to_string(), &rule));
        }
        let plain = |text: &String| {
            !text.is_empty() && text.len() <= longest && text.bytes().all(|b| b.is_ascii_graphic())
        };
        if let Some(bad) = list.iter().find(|text| !plain(text)) {
            let rule = format!("have 1 to {longest} characters, no space");
            return Err(ApiError::constraint(name, bad, &rule));
        }
    }
    match cors.max_age {
        Some(age) if age > 86_400 => {
            Err(ApiError::constraint("cors.maxAge", &age.to_string(), "be at most 86400"))
        }
        _ => Ok(()),
    }
}

/// The port in the URL is that of the request for this document.
fn document(
    scope: &Scope,
    name: &str,
    qualifier: Option<&str>,
    url: &FunctionUrl,
    headers: &HeaderMap,
) -> Value {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let port = host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
    let port = port.map(|(_, port)| format!(":{port}")).unwrap_or_default();
    let mut document = json!({
        "FunctionUrl": format!("http://{}.{LABEL}.{}.localhost{port}/", url.id, scope.region),
        "FunctionArn": scope.arn(name, qualifier.filter(|name| *name != LATEST)).to_string(),
        "AuthType": if url.signed { "AWS_IAM" } else { "NONE" },
        "CreationTime": url.created,
        "LastModifiedTime": url.modified,
        "InvokeMode": if url.stream { "RESPONSE_STREAM" } else { "BUFFERED" },
    });
    if let Some(cors) = &url.cors {
        document["Cors"] = json!(cors);
    }
    document
}
