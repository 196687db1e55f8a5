//! What most operations begin with: the daemon that is asked, and the function that the request's path names.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Query as UrlQuery, RawPathParams};
use axum::http::request::Parts;

use super::{ApiError, Query};
use crate::daemon::Daemon;
use crate::functions::Target;

/// A function, or one of its versions by the query's qualifier.
pub(super) struct Qualified {
    pub(super) daemon: Arc<Daemon>,
    pub(super) target: Target,
}

/// A function, for an operation that is not for its versions.
pub(super) struct Unqualified {
    pub(super) daemon: Arc<Daemon>,
    pub(super) target: Target,
    pub(super) query: Query,
    /// The alias that the path names.
    pub(super) alias: String,
}

impl FromRequestParts<Arc<Daemon>> for Qualified {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, daemon: &Arc<Daemon>) -> Result<Self, ApiError> {
        let query = query(parts).await?;
        let name = word(parts, "name").await?;
        let target = Target::parse(&name, query.qualifier.as_deref())?;
        Ok(Self { daemon: Arc::clone(daemon), target })
    }
}

impl FromRequestParts<Arc<Daemon>> for Unqualified {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, daemon: &Arc<Daemon>) -> Result<Self, ApiError> {
        let target = Target::parse(&word(parts, "name").await?, None)?;
        if target.qualifier.is_some() {
            let message = "This operation is for functions, not for their versions.";
            return Err(ApiError::invalid(message));
        }
        let (query, alias) = (query(parts).await?, word(parts, "alias").await?);
        Ok(Self { daemon: Arc::clone(daemon), target, query, alias })
    }
}

/// What the query says, where the path names no function.
pub(super) struct ValidQuery(pub(super) Query);

impl FromRequestParts<Arc<Daemon>> for ValidQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Daemon>) -> Result<Self, ApiError> {
        query(parts).await.map(Self)
    }
}

async fn query(parts: &mut Parts) -> Result<Query, ApiError> {
    let query = UrlQuery::from_request_parts(parts, &()).await;
    query.map(|UrlQuery(query)| query).map_err(|error| ApiError::invalid(error.body_text()))
}

/// A parameter of the path; nothing where it has none of this name.
async fn word(parts: &mut Parts, name: &str) -> Result<String, ApiError> {
    let words = RawPathParams::from_request_parts(parts, &()).await;
    let words = words.map_err(|error| ApiError::invalid(error.body_text()))?;
    let word = words.iter().find(|(found, _)| *found == name);
    Ok(word.map(|(_, word)| word.to_owned()).unwrap_or_default())
}
