//! AWS Lambda's REST API over HTTP/1.1.
//!
//! Each handler reads a request, calls an operation of [`Control`], and writes the answer.
//! [`error`] maps the errors of the operations to AWS Lambda's errors.

mod account;
mod aliases;
mod authorize;
mod body;
mod configuration;
mod documents;
mod error;
mod event_stream;
mod events;
mod extract;
mod functions;
mod invoke;
mod layers;
mod names;
mod once;
mod operations;
mod pages;
mod permissions;
mod provisioned;
mod settings;
mod tags;
mod urls;
mod versions;

use std::sync::Arc;

use axum::Router;
use axum::http::HeaderName;
use axum::routing::{delete, get, post, put};
use firn_control::Control;
use tokio::sync::Semaphore;

pub(crate) use authorize::{Admission, Caller, with_admission};
#[cfg(test)]
pub(crate) use body::MAX_BODY;
pub(crate) use error::ApiError;
pub(crate) use names::Scope;
pub(crate) use operations::unknown;

/// The header with a request's id.
pub(crate) const REQUEST_ID: &str = "x-amzn-requestid";

/// The header with the report of a request, in JSON.
pub(crate) const REPORT: HeaderName = HeaderName::from_static("x-firn-report");

/// The service behind the API.
#[derive(Debug)]
pub(crate) struct Lambda {
    pub(crate) control: Arc<Control>,
    /// Region and account in ARNs.
    pub(crate) scope: Scope,
    /// A permit for each request whose code may be decoded at the same time.
    pub(crate) decoders: Arc<Semaphore>,
}

/// The routes of the API.
pub(crate) fn routes(lambda: Lambda) -> Router {
    let one = "/2015-03-31/functions/{name}";
    let path = |rest: &str| format!("{one}{rest}");
    let layer = |rest: &str| format!("/2018-10-31/layers/{{name}}/versions/{{version}}{rest}");
    Router::new()
        .route("/2015-03-31/functions", get(functions::list).post(functions::create))
        .route("/2015-03-31/functions/", get(functions::list).post(functions::create))
        .route(one, get(functions::get).delete(functions::delete))
        .route(&path("/code"), put(functions::update_code))
        .route(
            &path("/configuration"),
            get(functions::get_configuration).put(functions::update_configuration),
        )
        .route(&path("/versions"), get(versions::list).post(versions::publish))
        .route(&path("/aliases"), get(aliases::list).post(aliases::create))
        .route(
            &path("/aliases/{part}"),
            get(aliases::get).put(aliases::update).delete(aliases::delete),
        )
        .route(&path("/invocations"), post(invoke::invoke))
        .route(
            "/2017-10-31/functions/{name}/concurrency",
            put(functions::put_concurrency).delete(functions::delete_concurrency),
        )
        .route("/2019-09-30/functions/{name}/concurrency", get(functions::get_concurrency))
        .route(&path("/policy"), get(permissions::get).post(permissions::add))
        .route(&path("/policy/{part}"), delete(permissions::remove))
        .route("/2017-03-31/tags/{name}", get(tags::list).post(tags::add).delete(tags::remove))
        .route(
            "/2019-09-25/functions/{name}/event-invoke-config",
            get(events::get).put(events::put).post(events::update).delete(events::delete),
        )
        .route("/2019-09-25/functions/{name}/event-invoke-config/list", get(events::list))
        .route(
            "/2019-09-30/functions/{name}/provisioned-concurrency",
            get(provisioned::get).put(provisioned::put).delete(provisioned::delete),
        )
        .route("/2020-06-30/functions/{name}/code-signing-config", get(account::code_signing))
        .route(
            "/2021-10-31/functions/{name}/url",
            get(urls::get).post(urls::create).put(urls::update).delete(urls::delete),
        )
        .route("/2021-10-31/functions/{name}/urls", get(urls::list))
        .route("/2021-11-15/functions/{name}/response-streaming-invocations", post(invoke::stream))
        .route("/2018-10-31/layers", get(layers::list))
        .route(
            "/2018-10-31/layers/{name}/versions",
            get(layers::list_versions).post(layers::publish),
        )
        .route(&layer(""), get(layers::get).delete(layers::delete))
        .route(&layer("/policy"), get(layers::get_policy).post(layers::add_permission))
        .route(&layer("/policy/{part}"), delete(layers::remove_permission))
        .route("/2016-08-19/account-settings", get(account::settings))
        .route("/2016-08-19/account-settings/", get(account::settings))
        .with_state(Arc::new(lambda))
}
