//! Extracts what most operations need: the service, and the function that the request's path names.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Query as UrlQuery, RawPathParams};
use axum::http::request::Parts;
use firn_control::Target;
use serde::Deserialize;

use super::authorize::Caller;
use super::names::parse;
use super::{ApiError, Lambda};

/// The query's parameters that the API uses.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub(super) struct Query {
    pub(super) qualifier: Option<String>,
    pub(super) function_version: Option<String>,
    pub(super) marker: Option<String>,
    pub(super) max_items: Option<usize>,
    pub(super) revision_id: Option<String>,
    pub(super) list: Option<String>,
}

/// A function, or the version or alias in the query.
pub(super) struct Qualified {
    pub(super) lambda: Arc<Lambda>,
    pub(super) target: Target,
    pub(super) query: Query,
    /// What the path names of it; empty if it names nothing.
    pub(super) part: String,
}

/// A function, for an operation that does not apply to versions.
pub(super) struct Unqualified {
    pub(super) lambda: Arc<Lambda>,
    pub(super) target: Target,
    pub(super) query: Query,
    /// The alias in the path; empty if the path has none.
    pub(super) part: String,
}

impl FromRequestParts<Arc<Lambda>> for Qualified {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, lambda: &Arc<Lambda>) -> Result<Self, ApiError> {
        let query = query(parts).await?;
        let name = word(parts, "name").await?;
        let target =
            parse(&name, query.qualifier.as_deref(), &lambda.scope)?.of_tenant(tenant(parts));
        let part = word(parts, "part").await?;
        Ok(Self { lambda: Arc::clone(lambda), target, query, part })
    }
}

impl FromRequestParts<Arc<Lambda>> for Unqualified {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, lambda: &Arc<Lambda>) -> Result<Self, ApiError> {
        let target =
            parse(&word(parts, "name").await?, None, &lambda.scope)?.of_tenant(tenant(parts));
        if target.qualifier().is_some() {
            let message = "This operation applies to functions, not to their versions.";
            return Err(ApiError::invalid(message));
        }
        let (query, part) = (query(parts).await?, word(parts, "part").await?);
        Ok(Self { lambda: Arc::clone(lambda), target, query, part })
    }
}

/// The query of a request whose path names no function.
pub(super) struct ValidQuery(pub(super) Query);

impl FromRequestParts<Arc<Lambda>> for ValidQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Lambda>) -> Result<Self, ApiError> {
        query(parts).await.map(Self)
    }
}

/// The tenant that has signed the request.
fn tenant(parts: &Parts) -> Option<String> {
    parts.extensions.get::<Caller>().and_then(|caller| caller.0.clone())
}

async fn query(parts: &mut Parts) -> Result<Query, ApiError> {
    let query = UrlQuery::from_request_parts(parts, &()).await;
    query.map(|UrlQuery(query)| query).map_err(|error| ApiError::invalid(error.body_text()))
}

/// A parameter of the path; empty if the path does not have it.
async fn word(parts: &mut Parts, name: &str) -> Result<String, ApiError> {
    let words = RawPathParams::from_request_parts(parts, &()).await;
    let words = words.map_err(|error| ApiError::invalid(error.body_text()))?;
    let word = words.iter().find(|(found, _)| *found == name);
    Ok(word.map(|(_, word)| word.to_owned()).unwrap_or_default())
}
