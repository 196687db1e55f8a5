//! What is attached to functions, versions and aliases: permissions, and settings of events.

use std::sync::Arc;

use uuid::Uuid;

use super::Control;
use super::errors::{AttachmentError, FindError, NotFound, RevisionMismatch};
use super::functions::function;
use crate::blocking::blocking;
use crate::functions::{Attachments, EventSettings, LATEST, Permission, Target, new_revision};
use crate::store::Change;

/// The longest permissions of a function, version or alias together, bytes.
pub const MAX_PERMISSIONS: usize = 20 << 10;

impl Control {
    /// The permissions of a function, version or alias, and their revision.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn permissions(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<(Vec<Permission>, String), AttachmentError> {
        let found = self.attachments(target).await?;
        if found.permissions.is_empty() {
            return Err(AttachmentError::None(target.clone()));
        }
        Ok((found.permissions, found.permissions_revision.to_string()))
    }

    /// Adds a permission, if the revision of the others is `revision` or `revision` is `None`.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn add_permission(
        self: &Arc<Self>,
        target: &Target,
        new: Permission,
        revision: Option<String>,
    ) -> Result<(), AttachmentError> {
        self.change_permissions(target, revision, |all| add_statement(all, new)).await
    }

    /// Removes a permission, if the revision of all is `revision` or `revision` is `None`.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn remove_permission(
        self: &Arc<Self>,
        target: &Target,
        id: String,
        revision: Option<String>,
    ) -> Result<(), AttachmentError> {
        self.change_permissions(target, revision, |all| remove_statement(all, id)).await
    }

    async fn change_permissions(
        self: &Arc<Self>,
        target: &Target,
        revision: Option<String>,
        work: impl FnOnce(&mut Vec<Permission>) -> Result<(), AttachmentError> + Send + 'static,
    ) -> Result<(), AttachmentError> {
        if target.qualifier() == Some(LATEST) {
            return Err(AttachmentError::Latest);
        }
        self.change_attachments(target, |attachments| {
            let current = &mut attachments.permissions_revision;
            change_policy(&mut attachments.permissions, current, revision, work)
        })
        .await
    }

    /// How the events of a function, version or alias are retried, if it has such settings.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn event_settings(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<Option<EventSettings>, FindError> {
        Ok(self.attachments(target).await?.events)
    }

    /// The settings of events of a function, its versions and aliases, by qualifier.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn all_event_settings(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<Vec<(String, EventSettings)>, FindError> {
        let all = self.all_attachments(target).await?.into_iter();
        Ok(all.filter_map(|(qualifier, found)| Some((qualifier, found.events?))).collect())
    }

    /// Changes how events are retried. `work` gets the settings, and returns the new ones.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn set_event_settings(
        self: &Arc<Self>,
        target: &Target,
        work: impl FnOnce(Option<EventSettings>) -> Option<EventSettings> + Send + 'static,
    ) -> Result<Option<EventSettings>, AttachmentError> {
        self.change_attachments(target, |attachments| {
            attachments.events = work(attachments.events.take());
            Ok(attachments.events.clone())
        })
        .await
    }

    /// Removes the settings of events. Returns whether there were any.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn delete_event_settings(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<bool, AttachmentError> {
        self.change_attachments(target, |attachments| Ok(attachments.events.take().is_some())).await
    }

    /// What is attached to a function, version or alias.
    pub(super) async fn attachments(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<Attachments, FindError> {
        let (control, target) = (Arc::clone(self), target.clone());
        blocking(move || {
            control.find_now(&target)?;
            Ok(control.store.attachments(target.name(), key(&target))?)
        })
        .await
    }

    /// What is attached to a function, its versions and aliases, by qualifier.
    pub(super) async fn all_attachments(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<Vec<(String, Attachments)>, FindError> {
        let (control, target) = (Arc::clone(self), target.clone());
        blocking(move || {
            control.find_now(&target)?;
            Ok(control.store.all_attachments(target.name())?)
        })
        .await
    }

    /// Changes what is attached to a function, version or alias.
    pub(super) async fn change_attachments<T: Send + 'static>(
        self: &Arc<Self>,
        target: &Target,
        work: impl FnOnce(&mut Attachments) -> Result<T, AttachmentError> + Send + 'static,
    ) -> Result<T, AttachmentError> {
        let (control, target) = (Arc::clone(self), target.clone());
        blocking(move || {
            let (done, recount) = control.store.change(|change| {
                check_exists(change, &target)?;
                let mut attachments = change.attachments(target.name(), key(&target))?;
                let before = attachments.provisioned.clone();
                let done = work(&mut attachments)?;
                change.put_attachments(target.name(), key(&target), &attachments)?;
                let recount = attachments.provisioned != before;
                if recount {
                    control.check_provisioned::<AttachmentError>(change, target.name())?;
                }
                Ok::<_, AttachmentError>((done, recount))
            })?;
            if recount {
                control.keep_provisioned();
            }
            Ok(done)
        })
        .await
    }
}

/// Changes permissions whose revision is `expected`, or whatever it is, and their revision.
pub(super) fn change_policy(
    permissions: &mut Vec<Permission>,
    revision: &mut Uuid,
    expected: Option<String>,
    work: impl FnOnce(&mut Vec<Permission>) -> Result<(), AttachmentError>,
) -> Result<(), AttachmentError> {
    if expected.is_some_and(|expected| expected != revision.to_string()) {
        return Err(RevisionMismatch.into());
    }
    work(permissions)?;
    *revision = if permissions.is_empty() { Uuid::nil() } else { new_revision() };
    Ok(())
}

/// Adds a permission to others.
pub(super) fn add_statement(
    permissions: &mut Vec<Permission>,
    new: Permission,
) -> Result<(), AttachmentError> {
    if permissions.iter().any(|permission| permission.id == new.id) {
        return Err(AttachmentError::StatementExists(new.id));
    }
    permissions.push(new);
    if permissions.iter().map(Permission::length).sum::<usize>() > MAX_PERMISSIONS {
        return Err(AttachmentError::TooLong);
    }
    Ok(())
}

/// Removes a permission.
pub(super) fn remove_statement(
    permissions: &mut Vec<Permission>,
    id: String,
) -> Result<(), AttachmentError> {
    let place = permissions.iter().position(|permission| permission.id == id);
    permissions.remove(place.ok_or(AttachmentError::NoStatement(id))?);
    Ok(())
}

/// The qualifier under which attachments are stored. Numbers of versions may begin with zeros in
/// requests.
fn key(target: &Target) -> &str {
    match target.qualifier() {
        Some(number) if number.bytes().all(|byte| byte.is_ascii_digit()) => {
            number.trim_start_matches('0')
        }
        qualifier => qualifier.unwrap_or(LATEST),
    }
}

/// Fails if there is no such function, version or alias.
fn check_exists(change: &Change, target: &Target) -> Result<(), AttachmentError> {
    function::<AttachmentError>(change, target)?;
    let name = target.name();
    let exists = match target.qualifier() {
        None | Some(LATEST) => true,
        Some(qualifier) => match qualifier.parse() {
            Ok(number) => change.version(name, number)?.is_some(),
            Err(_) => change.alias(name, qualifier)?.is_some(),
        },
    };
    if exists { Ok(()) } else { Err(NotFound::Function(target.clone()).into()) }
}
