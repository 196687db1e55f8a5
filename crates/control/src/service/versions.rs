//! Published versions.

use std::sync::Arc;

use super::Control;
use super::errors::{FindError, PublishError, RevisionMismatch};
use super::functions::function;
use crate::blocking::blocking;
use crate::functions::{
    RESTORE_HOOK_VARIABLE, Target, Version, VersionState, new_revision, timestamp,
};

/// A version to publish.
#[derive(Debug, Default)]
pub struct PublishRequest {
    /// The SHA-256 of the code that the client expects, in base64.
    pub code_sha256: Option<String>,
    /// The version's description; that of `$LATEST` by default.
    pub description: Option<String>,
    /// The revision of `$LATEST` that the client expects.
    pub revision: Option<String>,
}

impl Control {
    /// Publishes `$LATEST` as a new version. If nothing has changed since the last version, returns
    /// the last version. The snapshot, if the function has one, is frozen in the background.
    ///
    /// # Errors
    /// See [`PublishError`].
    pub async fn publish(
        self: &Arc<Self>,
        target: &Target,
        request: PublishRequest,
    ) -> Result<Version, PublishError> {
        let (control, target) = (Arc::clone(self), target.clone());
        let (version, new) = blocking(move || control.make_version(&target, &request)).await?;
        if new && version.state == VersionState::Pending {
            let control = Arc::clone(self);
            tokio::spawn(control.freeze(version.clone()));
        }
        Ok(version)
    }

    /// Makes a version. The second value is false if it is the last version.
    fn make_version(
        &self,
        target: &Target,
        request: &PublishRequest,
    ) -> Result<(Version, bool), PublishError> {
        let name = target.name();
        self.store.change(|change| {
            let mut function = function::<PublishError>(change, target)?;
            let owner = function.owner.clone();
            let latest = &function.latest;
            let expected = request.revision.as_deref();
            if expected.is_some_and(|expected| expected != latest.revision.to_string()) {
                return Err(PublishError::Revision(RevisionMismatch));
            }
            let actual = latest.code.sha256_base64();
            check_restore_hook(latest)?;
            self.tenants.check_planner(owner.as_deref(), latest)?;
            if let Some(expected) = request.code_sha256.clone().filter(|digest| *digest != actual) {
                return Err(PublishError::Code { expected, actual });
            }
            let last = match function.next_version {
                0 | 1 => None,
                next => change.version(name, next - 1)?,
            };
            if let Some(last) = last.filter(|last| is_same(last, latest)) {
                return Ok((last, false));
            }
            let number = function.next_version;
            let version = Version {
                version: number.to_string(),
                revision: new_revision(),
                last_modified: timestamp(),
                description: request.description.clone().unwrap_or(latest.description.clone()),
                state: match latest.snap_start {
                    true => VersionState::Pending,
                    false => VersionState::Active,
                },
                owner: owner.clone(),
                ..latest.clone()
            };
            function.next_version += 1;
            change.put_function(name, &function)?;
            change.put_version(name, number, &version)?;
            self.tenants.check_versions::<PublishError>(change, owner.as_deref(), &version)?;
            Ok((version, true))
        })
    }

    /// `$LATEST` and the published versions of a function, oldest first.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn versions(self: &Arc<Self>, target: &Target) -> Result<Vec<Version>, FindError> {
        let (control, target) = (Arc::clone(self), target.clone());
        blocking(move || {
            let latest = control.find_now(&target)?.version;
            let published = control.store.versions(target.name())?;
            Ok(std::iter::once(latest).chain(published).collect())
        })
        .await
    }
}

/// Refuses to publish a version whose clones would share their random state. Those of languages
/// replace it by firn's own hooks.
pub(super) fn check_restore_hook(version: &Version) -> Result<(), PublishError> {
    let has_hook = version.runtime.language().is_some()
        || version.environment.contains_key(RESTORE_HOOK_VARIABLE);
    if version.snap_start && !has_hook { Err(PublishError::NoRestoreHook) } else { Ok(()) }
}

/// Whether a published version has the code and configuration of `$LATEST`.
fn is_same(published: &Version, latest: &Version) -> bool {
    published.code == latest.code
        && published.layers == latest.layers
        && published.environment == latest.environment
        && published.runtime == latest.runtime
        && published.handler == latest.handler
        && published.role == latest.role
        && (published.timeout, published.memory) == (latest.timeout, latest.memory)
        && published.storage == latest.storage
        && published.snap_start == latest.snap_start
}
