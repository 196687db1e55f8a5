//! Tags of functions.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Control;
use super::errors::{AttachmentError, FindError, InvalidTag};
use crate::functions::Target;

/// Limit of a function's tags.
pub(super) const MAX_TAGS: usize = 50;

impl Control {
    /// The tags of a function.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn tags(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<BTreeMap<String, String>, FindError> {
        Ok(self.attachments(target).await?.tags)
    }

    /// Adds tags to a function, and replaces those of the same keys.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn tag(
        self: &Arc<Self>,
        target: &Target,
        tags: BTreeMap<String, String>,
    ) -> Result<(), AttachmentError> {
        self.change_tags(target, |all| all.extend(tags)).await
    }

    /// Removes tags of a function.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn untag(
        self: &Arc<Self>,
        target: &Target,
        keys: Vec<String>,
    ) -> Result<(), AttachmentError> {
        self.change_tags(target, move |all| all.retain(|key, _| !keys.contains(key))).await
    }

    async fn change_tags(
        self: &Arc<Self>,
        target: &Target,
        work: impl FnOnce(&mut BTreeMap<String, String>) + Send + 'static,
    ) -> Result<(), AttachmentError> {
        if target.qualifier().is_some() {
            return Err(AttachmentError::Qualified);
        }
        self.change_attachments(target, |attachments| {
            work(&mut attachments.tags);
            Ok(check_tags(&attachments.tags)?)
        })
        .await
    }
}

/// Checks all tags of a function by the rules of AWS Lambda.
pub(super) fn check_tags(tags: &BTreeMap<String, String>) -> Result<(), InvalidTag> {
    if tags.len() > MAX_TAGS {
        return Err(InvalidTag::TooMany);
    }
    let plain = |text: &str| {
        text.chars().all(|c| c.is_alphanumeric() || c.is_whitespace() || "_.:/=+-@".contains(c))
    };
    for (key, value) in tags {
        let length = key.chars().count();
        if !(1..=128).contains(&length) || !plain(key) || key.starts_with("aws:") {
            return Err(InvalidTag::Key(key.clone()));
        }
        if value.chars().count() > 256 || !plain(value) {
            return Err(InvalidTag::Value(key.clone()));
        }
    }
    Ok(())
}
