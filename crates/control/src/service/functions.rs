//! Functions: create, read, change, delete.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use uuid::Uuid;

use super::Control;
use super::errors::{
    AttachmentError, ChangeError, DeleteError, FindError, NotFound, RevisionMismatch,
};
use super::layers::{check_content, find_layers};
use super::tags::check_tags;
use super::versions::{PublishRequest, check_restore_hook};
use crate::blocking::blocking;
use crate::functions::{
    Attachments, Code, CodeStore, ConfigurationChange, ConfigurationError, FunctionRecord, LATEST,
    Target, Version, new_latest, new_revision, timestamp,
};
use crate::store::{Change, StoreError};

/// What an operation keeps as long as it holds the bytes of a request, such as a share of a buffer.
pub type Hold = Option<Box<dyn std::any::Any + Send + Sync>>;

/// A function to create.
#[derive(Debug)]
pub struct NewFunction {
    /// Its name; the qualifier is not used.
    pub target: Target,
    /// Its configuration. The runtime, handler and role are required.
    pub configuration: ConfigurationChange,
    /// The zip file with its code.
    pub zip: Vec<u8>,
    /// Its tags.
    pub tags: BTreeMap<String, String>,
    /// Whether to publish a version.
    pub publish: bool,
    /// Dropped together with the zip file.
    pub hold: Hold,
}

/// New code for `$LATEST`.
#[derive(Debug)]
pub struct CodeChange {
    /// The zip file.
    pub zip: Vec<u8>,
    /// Whether to publish a version.
    pub publish: bool,
    /// Whether to check the code only.
    pub dry_run: bool,
    /// The revision that the client expects.
    pub revision: Option<String>,
    /// Dropped together with the zip file.
    pub hold: Hold,
}

/// The version that a request names.
#[derive(Debug)]
pub struct Found {
    /// The version.
    pub version: Version,
    /// The function's id.
    pub(super) function: Uuid,
    /// The function's limit of requests in flight.
    pub concurrency: Option<u32>,
}

impl Control {
    /// Creates a function. Returns `$LATEST`, or the published version.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub async fn create_function(
        self: &Arc<Self>,
        new: NewFunction,
    ) -> Result<Version, ChangeError> {
        let (control, publish) = (Arc::clone(self), new.publish);
        let target = new.target.clone();
        let created = blocking(move || control.create(new)).await;
        if let Err(ChangeError::Quota(_)) = created {
            self.sweep_code().await;
        }
        let created = created?;
        tracing::info!(function = created.function, "created");
        if publish {
            return Ok(self.publish(&target, PublishRequest::default()).await?);
        }
        Ok(created)
    }

    fn create(&self, new: NewFunction) -> Result<Version, ChangeError> {
        let name = new.target.name();
        let layers = new.configuration.layers.clone().unwrap_or_default();
        // Cheap checks come before the zip file is read.
        let mut latest = new_latest(name, new.configuration, CodeStore::code_of(&new.zip))?;
        self.check_image(&latest)?;
        check_tags(&new.tags)?;
        let attachments = Attachments { tags: new.tags, ..Attachments::default() };
        let owner = new.target.tenant().map(ToOwned::to_owned);
        self.tenants.check_planner(owner.as_deref(), &latest)?;
        if new.publish {
            check_restore_hook(&latest)?;
        }
        let exists = || ChangeError::Exists(name.to_owned());
        if self.store.function(name)?.is_some() {
            return Err(exists());
        }
        let _lock = self.code_lock.lock();
        latest.code = self.code.put(&new.zip)?;
        let id = Uuid::new_v4();
        let mut function = FunctionRecord { id, next_version: 1, concurrency: None, owner, latest };
        let function = self.store.change(|change| {
            if change.function(name)?.is_some() {
                return Err(exists());
            }
            let latest = &mut function.latest;
            latest.layers = find_layers(change, &layers, function.owner.as_deref())?;
            check_content(latest)?;
            change.put_function(name, &function)?;
            change.put_attachments(name, LATEST, &attachments)?;
            let owner = function.owner.as_deref();
            self.tenants.check_functions::<ChangeError>(change, owner)?;
            self.tenants.check_code::<ChangeError>(change, owner)?;
            Ok(function)
        })?;
        Ok(function.latest)
    }

    /// `$LATEST` of all functions of a tenant; with `published`, each followed by its published
    /// versions.
    ///
    /// # Errors
    /// The database failed.
    pub async fn functions(
        self: &Arc<Self>,
        tenant: Option<String>,
        published: bool,
    ) -> Result<Vec<Version>, FindError> {
        let control = Arc::clone(self);
        blocking(move || {
            let mut versions = Vec::new();
            let others =
                |owner: &Option<String>| owner.is_some() && tenant.is_some() && *owner != tenant;
            for function in control.store.functions()? {
                if others(&function.owner) {
                    continue;
                }
                let name = function.latest.function.clone();
                versions.push(function.latest);
                if published {
                    versions.extend(control.store.versions(&name)?);
                }
            }
            Ok(versions)
        })
        .await
    }

    /// The version that `target` names.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn find(self: &Arc<Self>, target: &Target) -> Result<Found, FindError> {
        let (control, target) = (Arc::clone(self), target.clone());
        blocking(move || control.find_now(&target)).await
    }

    /// The version that serves a request to `target`: of an alias with two versions, one of them.
    pub(super) async fn route(self: &Arc<Self>, target: &Target) -> Result<Found, FindError> {
        let (control, target) = (Arc::clone(self), target.clone());
        blocking(move || control.find_version(&target, Some(draw))).await
    }

    /// [`Control::find`] on the calling thread, which it blocks.
    pub(super) fn find_now(&self, target: &Target) -> Result<Found, FindError> {
        self.find_version(target, None)
    }

    /// The version that `target` names, or, with a source of random numbers, the version that
    /// serves a request.
    fn find_version(&self, target: &Target, draw: Option<fn() -> f64>) -> Result<Found, FindError> {
        let missing = || NotFound::Function(target.clone());
        let name = target.name();
        let function = self.store.function(name)?.ok_or_else(missing)?;
        function.check_owner(target)?;
        let (concurrency, id) = (function.concurrency, function.id);
        let number = match target.qualifier() {
            None | Some(LATEST) => {
                return Ok(Found { version: function.latest, function: id, concurrency });
            }
            Some(number) if number.bytes().all(|byte| byte.is_ascii_digit()) => number.to_owned(),
            Some(alias) => {
                let alias = self.store.alias(name, alias)?.ok_or_else(missing)?;
                match draw.filter(|_| alias.additional.is_some()) {
                    Some(draw) => alias.into_version(draw()),
                    None => alias.version,
                }
            }
        };
        let version = self.store.version(name, &number)?.ok_or_else(missing)?;
        Ok(Found { version, function: id, concurrency })
    }

    /// The path of a version's zip file.
    #[must_use]
    pub fn code_path(&self, version: &Version) -> PathBuf {
        self.code.path(&version.code)
    }

    /// Changes the code of `$LATEST`. Returns it, or the published version.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub async fn update_code(
        self: &Arc<Self>,
        target: &Target,
        change: CodeChange,
    ) -> Result<Version, ChangeError> {
        let publish = change.publish && !change.dry_run;
        let updated = blocking({
            let (control, target) = (Arc::clone(self), target.clone());
            move || control.change_code(&target, &change)
        })
        .await;
        if let Ok(_) | Err(ChangeError::Quota(_)) = updated {
            self.sweep_code().await;
        }
        let updated = updated?;
        if publish {
            return Ok(self.publish(target, PublishRequest::default()).await?);
        }
        Ok(updated)
    }

    fn change_code(&self, target: &Target, change: &CodeChange) -> Result<Version, ChangeError> {
        let _lock = self.code_lock.lock();
        let code: Code = self.code.put(&change.zip)?;
        if change.dry_run {
            let mut version = self.find_now(target)?.version;
            version.code = code;
            return Ok(version);
        }
        self.change_latest(target, change.revision.as_deref(), |_, version| {
            if change.publish {
                check_restore_hook(version)?;
            }
            version.code = code;
            Ok(())
        })
    }

    /// Changes the configuration of `$LATEST`, if its revision is `revision` or `revision` is
    /// `None`.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub async fn update_configuration(
        self: &Arc<Self>,
        target: &Target,
        configuration: ConfigurationChange,
        revision: Option<String>,
    ) -> Result<Version, ChangeError> {
        let (control, target) = (Arc::clone(self), target.clone());
        let layers = configuration.layers.clone();
        let sweep = layers.is_some();
        let changed = blocking(move || {
            let names_image =
                configuration.environment.is_some() || configuration.runtime.is_some();
            // The code of a layer that is deleted meanwhile stays.
            let _lock = layers.is_some().then(|| control.code_lock.lock());
            control.change_latest(&target, revision.as_deref(), |change, version| {
                configuration.apply(version)?;
                if let Some(layers) = &layers {
                    version.layers = find_layers(change, layers, target.tenant())?;
                }
                // A missing image prevents only changes of what names the image.
                if names_image {
                    control.check_image(version)?;
                }
                Ok(())
            })
        })
        .await;
        if sweep {
            self.sweep_code().await;
        }
        changed
    }

    /// Limits the requests in flight of a function, or removes the limit.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn set_concurrency(
        self: &Arc<Self>,
        target: &Target,
        limit: Option<u32>,
    ) -> Result<(), AttachmentError> {
        let (control, target) = (Arc::clone(self), target.clone());
        blocking(move || {
            control.store.change(|change| {
                let mut function = function::<AttachmentError>(change, &target)?;
                function.concurrency = limit;
                change.put_function(target.name(), &function)?;
                control.check_provisioned(change, target.name())
            })
        })
        .await
    }

    /// Deletes a function with its versions and aliases, or the version that `target` names.
    ///
    /// # Errors
    /// See [`DeleteError`].
    pub async fn delete(self: &Arc<Self>, target: &Target) -> Result<(), DeleteError> {
        let (control, target) = (Arc::clone(self), target.clone());
        let deleted = blocking(move || {
            let deleted = match target.qualifier() {
                None => control.delete_function(&target),
                Some(LATEST) => Err(DeleteError::Latest),
                Some(version) => control.delete_version(&target, version),
            }?;
            control.recount_provisioned();
            Ok::<_, DeleteError>(deleted)
        })
        .await?;
        let control = Arc::clone(self);
        let forgetting = tokio::spawn(async move {
            for version in deleted {
                tracing::info!(function = version.function, version = version.version, "deleted");
                control.forget(version).await;
            }
            control.sweep_code().await;
        });
        // It goes on if the client disconnects. It does not panic.
        let _ = forgetting.await;
        Ok(())
    }

    fn delete_function(&self, target: &Target) -> Result<Vec<Version>, DeleteError> {
        let (id, deleted) = self.store.delete(|change| {
            let function = function::<DeleteError>(change, target)?;
            let mut deleted = change.versions(target.name())?;
            deleted.iter().try_for_each(|version| self.schedule_purge(change, version))?;
            deleted.push(function.latest);
            change.remove_function(target.name())?;
            Ok::<_, DeleteError>((function.id, deleted))
        })?;
        self.fleet.metrics.deleted(target.name(), id);
        Ok(deleted)
    }

    fn delete_version(&self, target: &Target, version: &str) -> Result<Vec<Version>, DeleteError> {
        let Ok(number) = version.parse::<u64>() else { return Err(DeleteError::Alias) };
        // Without the zeros that a request may have before it.
        let version = number.to_string();
        let name = target.name();
        self.store.delete(|change| {
            function::<DeleteError>(change, target)?;
            let Some(found) = change.version(name, number)? else {
                return Err(NotFound::Function(target.clone()).into());
            };
            let aliases = change.aliases(name)?;
            if let Some((alias, _)) = aliases.into_iter().find(|(_, a)| a.names(&version)) {
                return Err(DeleteError::Aliased { version: version.clone(), alias });
            }
            change.remove_version(name, number)?;
            change.put_attachments(name, &version, &Attachments::default())?;
            self.schedule_purge(change, &found)?;
            Ok(vec![found])
        })
    }

    /// Changes `$LATEST`, and ends its microVMs.
    fn change_latest(
        &self,
        target: &Target,
        expected: Option<&str>,
        work: impl FnOnce(&Change, &mut Version) -> Result<(), ChangeError>,
    ) -> Result<Version, ChangeError> {
        let (before, after) = self.store.change(|change| {
            let mut function = function::<ChangeError>(change, target)?;
            let owner = function.owner.clone();
            let before = function.latest.revision;
            let files = (function.latest.code.clone(), function.latest.layers.clone());
            if expected.is_some_and(|expected| expected != before.to_string()) {
                return Err(ChangeError::Revision(RevisionMismatch));
            }
            work(change, &mut function.latest)?;
            check_content(&function.latest)?;
            self.tenants.check_planner(owner.as_deref(), &function.latest)?;
            function.latest.revision = new_revision();
            function.latest.last_modified = timestamp();
            change.put_function(target.name(), &function)?;
            if (&function.latest.code, &function.latest.layers) != (&files.0, &files.1) {
                self.tenants.check_code::<ChangeError>(change, owner.as_deref())?;
            }
            Ok((before, function.latest))
        })?;
        self.fleet.retire(before);
        Ok(after)
    }

    fn check_image(&self, version: &Version) -> Result<(), ConfigurationError> {
        self.fleet.launcher.images.of(version)?;
        Ok(())
    }

    /// Removes the code that no version and no layer uses.
    pub(super) async fn sweep_code(self: &Arc<Self>) {
        let control = Arc::clone(self);
        let swept = blocking(move || {
            let _lock = control.code_lock.lock();
            let versions = control.all_versions()?;
            let layers = control.store.layers()?.into_iter();
            let layers = layers.flat_map(|(_, layer)| layer.versions);
            let layers = layers.map(|version| control.code.path(&version.code));
            let codes = versions.iter().flat_map(Version::codes);
            let used: HashSet<PathBuf> =
                codes.map(|code| control.code.path(code)).chain(layers).collect();
            if let Err(error) = control.code.keep(|path| used.contains(path)) {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "cannot remove unused code"
                );
            }
            Ok::<_, FindError>(())
        });
        if let Err(error) = swept.await {
            let error: &(dyn std::error::Error + 'static) = &error;
            tracing::error!(error, "cannot find unused code");
        }
    }

    /// All versions of all functions, `$LATEST` included.
    pub(super) fn all_versions(&self) -> Result<Vec<Version>, StoreError> {
        let mut versions = Vec::new();
        for function in self.store.functions()? {
            versions.extend(self.store.versions(&function.latest.function)?);
            versions.push(function.latest);
        }
        Ok(versions)
    }
}

/// The function that `target` names, in a transaction.
pub(super) fn function<E: From<StoreError> + From<NotFound>>(
    change: &Change,
    target: &Target,
) -> Result<FunctionRecord, E> {
    let found = change.function(target.name())?;
    let found = found.ok_or_else(|| NotFound::Function(target.clone()))?;
    found.check_owner(target)?;
    Ok(found)
}

/// A random number from 0 to less than 1.
fn draw() -> f64 {
    // 32 of the 122 random bits of the id.
    let bits = u32::try_from(Uuid::new_v4().as_u128() & u128::from(u32::MAX));
    f64::from(bits.unwrap_or_default()) / 2_f64.powi(32)
}
