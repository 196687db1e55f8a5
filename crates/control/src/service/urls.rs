//! URLs that invoke functions.

use std::sync::Arc;

use super::Control;
use super::errors::{AttachmentError, FindError};
use crate::blocking::blocking;
use crate::functions::{Cors, FunctionUrl, LATEST, Permission, Target, new_revision, timestamp};

/// A URL that a request names by its id.
#[derive(Debug, Clone)]
pub struct UrlRequest {
    /// The function or alias that it invokes.
    pub target: Target,
    /// The URL.
    pub url: FunctionUrl,
    /// Whether a permission allows everyone to use it.
    pub public: bool,
}

impl Control {
    /// Creates the URL of a function or alias.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn create_url(
        self: &Arc<Self>,
        target: &Target,
        signed: bool,
        stream: bool,
        cors: Option<Cors>,
    ) -> Result<FunctionUrl, AttachmentError> {
        let of = target.clone();
        self.change_attachments(target, move |attachments| {
            if attachments.url.is_some() {
                return Err(AttachmentError::UrlExists(of));
            }
            let (id, created) = (new_revision().simple().to_string(), timestamp());
            let url = FunctionUrl { id, signed, stream, cors, modified: created.clone(), created };
            Ok(attachments.url.insert(url).clone())
        })
        .await
    }

    /// Changes the URL of a function or alias; `None` leaves a part as it is.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn update_url(
        self: &Arc<Self>,
        target: &Target,
        signed: Option<bool>,
        stream: Option<bool>,
        cors: Option<Cors>,
    ) -> Result<FunctionUrl, AttachmentError> {
        let of = target.clone();
        self.change_attachments(target, move |attachments| {
            let url = attachments.url.as_mut().ok_or(AttachmentError::None(of))?;
            url.signed = signed.unwrap_or(url.signed);
            url.stream = stream.unwrap_or(url.stream);
            url.cors = cors.or(url.cors.take());
            url.modified = timestamp();
            Ok(url.clone())
        })
        .await
    }

    /// Deletes the URL of a function or alias.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn delete_url(self: &Arc<Self>, target: &Target) -> Result<(), AttachmentError> {
        let of = target.clone();
        let deleted = self.change_attachments(target, move |attachments| {
            attachments.url.take().ok_or(AttachmentError::None(of))
        });
        deleted.await.map(drop)
    }

    /// The URL of a function or alias.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn url(self: &Arc<Self>, target: &Target) -> Result<FunctionUrl, AttachmentError> {
        let found = self.attachments(target).await?.url;
        found.ok_or_else(|| AttachmentError::None(target.clone()))
    }

    /// The URLs of a function and its aliases, by qualifier.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn urls(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<Vec<(String, FunctionUrl)>, FindError> {
        let all = self.all_attachments(target).await?.into_iter();
        Ok(all.filter_map(|(qualifier, found)| Some((qualifier, found.url?))).collect())
    }

    /// The URL with an id.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn url_of(self: &Arc<Self>, id: &str) -> Result<Option<UrlRequest>, FindError> {
        let (control, id) = (Arc::clone(self), id.to_owned());
        blocking(move || {
            let Some((name, qualifier)) = control.store.url(&id)? else { return Ok(None) };
            let attachments = control.store.attachments(&name, &qualifier)?;
            let qualifier = Some(qualifier.as_str()).filter(|qualifier| *qualifier != LATEST);
            // The URL may have been deleted since, and another one created in its place.
            let url = attachments.url.filter(|url| url.id == id);
            let (Some(url), Ok(target)) = (url, Target::new(&name, qualifier)) else {
                return Ok(None);
            };
            let public = attachments.permissions.iter().any(Permission::is_public_url);
            Ok(Some(UrlRequest { target, url, public }))
        })
        .await
    }
}

#[cfg(test)]
#[path = "urls_tests.rs"]
mod tests;
