//! Provisioned concurrency: versions of which a number of microVMs is always initialised.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use firn_base::error_chain;
use uuid::Uuid;

use super::Control;
use super::backoff::Backoff;
use super::errors::{AttachmentError, FindError, ProvisionedError};
use crate::functions::{Provisioned, Target, Version, timestamp};
use crate::instances::provide;
use crate::store::{Change, StoreError};

/// How often the microVMs of a version are counted.
const PERIOD: Duration = Duration::from_secs(1);

/// The provisioned concurrency of a version or alias.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProvisionedStatus {
    /// How many microVMs should be initialised.
    pub requested: u32,
    /// How many of them are.
    pub allocated: u32,
    /// When it was set, in the form of [`Version::last_modified`].
    pub modified: String,
    /// Why the last start failed. It is tried again.
    pub failure: Option<String>,
}

/// The revisions whose microVMs are counted by a task, and why the last start of one failed.
pub(super) type Keepers = HashMap<Uuid, Option<String>>;

impl Control {
    /// Keeps `count` microVMs of a version, or of the version that an alias names, initialised.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn set_provisioned(
        self: &Arc<Self>,
        target: &Target,
        count: u32,
    ) -> Result<ProvisionedStatus, AttachmentError> {
        let new = Provisioned { count, modified: timestamp() };
        self.change_provisioned(target, Some(new.clone())).await?;
        Ok(self.provisioned_status(target, new).await?)
    }

    /// Ends that.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn delete_provisioned(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<(), AttachmentError> {
        self.change_provisioned(target, None).await
    }

    /// The provisioned concurrency of a version or alias, if it has one.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn provisioned(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<Option<ProvisionedStatus>, FindError> {
        match self.attachments(target).await?.provisioned {
            Some(found) => Ok(Some(self.provisioned_status(target, found).await?)),
            None => Ok(None),
        }
    }

    /// The provisioned concurrency of a function's versions and aliases, by qualifier.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn all_provisioned(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<Vec<(String, ProvisionedStatus)>, FindError> {
        let mut all = Vec::new();
        for (qualifier, attachments) in self.all_attachments(target).await? {
            if let Some(found) = attachments.provisioned {
                let target = target.with_qualifier(qualifier.as_str());
                all.push((qualifier, self.provisioned_status(&target, found).await?));
            }
        }
        Ok(all)
    }

    async fn provisioned_status(
        self: &Arc<Self>,
        target: &Target,
        Provisioned { count: requested, modified }: Provisioned,
    ) -> Result<ProvisionedStatus, FindError> {
        let revision = self.find(target).await?.version.revision;
        let initialised = self.fleet.initialised(revision);
        let allocated = u32::try_from(initialised).map_or(requested, |all| all.min(requested));
        let failure = self.keepers.lock().get(&revision).cloned().flatten();
        Ok(ProvisionedStatus { requested, allocated, modified, failure })
    }

    async fn change_provisioned(
        self: &Arc<Self>,
        target: &Target,
        new: Option<Provisioned>,
    ) -> Result<(), AttachmentError> {
        self.change_attachments(target, |attachments| {
            attachments.provisioned = new;
            Ok(())
        })
        .await
    }

    /// Checks the provisioned concurrency of a function, in the transaction that changes it, an
    /// alias, or the function's limit of requests.
    pub(super) fn check_provisioned<E: From<StoreError> + From<ProvisionedError>>(
        &self,
        change: &Change,
        name: &str,
    ) -> Result<(), E> {
        let Some(function) = change.function(name)? else { return Ok(()) };
        let mut by_version: HashMap<String, String> = HashMap::new();
        let mut total = 0_u32;
        for (qualifier, attachments) in change.all_attachments(name)? {
            let Some(Provisioned { count, .. }) = attachments.provisioned else { continue };
            let number = match change.alias(name, &qualifier)? {
                Some(alias) if alias.additional.is_some() => {
                    return Err(ProvisionedError::Weights(qualifier).into());
                }
                Some(alias) => alias.version,
                None => qualifier.clone(),
            };
            let version = match number.parse() {
                Ok(number) => change.version(name, number)?,
                Err(_) => None,
            };
            let version = version.ok_or(ProvisionedError::Unpublished)?;
            if version.snap_start {
                return Err(ProvisionedError::SnapStart(number).into());
            }
            match by_version.entry(number) {
                Entry::Occupied(other) => {
                    let (version, by) = (other.key().clone(), [other.get().clone(), qualifier]);
                    return Err(ProvisionedError::Twice { version, by }.into());
                }
                Entry::Vacant(entry) => entry.insert(qualifier),
            };
            total = total.saturating_add(count);
        }
        if let Some(limit) = function.concurrency.filter(|limit| total > *limit) {
            return Err(ProvisionedError::OverReserved { total, limit }.into());
        }
        if total > 0 {
            let owner = function.owner.as_deref();
            self.tenants.check_provisioned::<E>(change, owner, self.monitors)?;
        }
        Ok(())
    }

    /// [`Control::keep_provisioned`], after a change of what may have provisioned concurrency.
    pub(super) fn recount_provisioned(self: &Arc<Self>) {
        if !self.keepers.lock().is_empty() {
            self.keep_provisioned();
        }
    }

    /// Has the fleet keep the microVMs of all versions with provisioned concurrency, and starts
    /// those that are missing, in the background. Blocks its thread, which belongs to a Tokio
    /// runtime.
    pub(super) fn keep_provisioned(self: &Arc<Self>) {
        // Held from the reading on: of two changes at once, the last one's numbers stay.
        let mut keepers = self.keepers.lock();
        let wanted = match self.provisioned_versions() {
            Ok(wanted) => wanted,
            Err(error) => {
                let error: &(dyn std::error::Error + 'static) = &error;
                return tracing::error!(error, "cannot read which versions are provisioned");
            }
        };
        let counts = wanted.iter().map(|(version, count)| (version.revision, *count));
        self.fleet.keep_initialised(counts.collect());
        for (version, _) in wanted {
            if let Entry::Vacant(keeper) = keepers.entry(version.revision) {
                keeper.insert(None);
                tokio::spawn(keep(Arc::downgrade(self), Arc::new(version)));
            }
        }
    }

    /// The versions with provisioned concurrency.
    fn provisioned_versions(&self) -> Result<Vec<(Version, usize)>, FindError> {
        let mut wanted = Vec::new();
        for function in self.store.functions()? {
            let name = &function.latest.function;
            for (qualifier, attachments) in self.store.all_attachments(name)? {
                let Some(Provisioned { count, .. }) = attachments.provisioned else { continue };
                let Ok(target) = Target::new(name, Some(&qualifier)) else { continue };
                match self.find_now(&target) {
                    Ok(found) => {
                        let count = usize::try_from(count).unwrap_or(usize::MAX);
                        wanted.push((found.version, count));
                    }
                    // Deleted meanwhile.
                    Err(FindError::NotFound(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(wanted)
    }

    /// Starts a microVM of a version if one is missing. Returns the wait before the next time;
    /// `None` if the version has no provisioned concurrency any more.
    async fn provide_missing(
        &self,
        version: &Arc<Version>,
        backoff: &mut Backoff,
    ) -> Option<Duration> {
        {
            let mut keepers = self.keepers.lock();
            match self.fleet.missing(version.revision) {
                Some(0) => return Some(PERIOD),
                Some(_) if !self.fleet.is_closed() => {}
                _ => {
                    keepers.remove(&version.revision);
                    return None;
                }
            }
        }
        let provided = provide(&self.fleet, &self.code, version).await;
        let failure = provided.as_ref().err().map(|error| error_chain(error));
        if let Some(error) = failure.as_ref().filter(|_| !self.fleet.is_closed()) {
            let (function, number) = (&version.function, &version.version);
            tracing::warn!(function, version = number, error, "not provisioned");
        }
        let pause = if failure.is_some() { backoff.next() } else { None };
        if let Some(last) = self.keepers.lock().get_mut(&version.revision) {
            *last = failure;
        }
        Some(pause.unwrap_or_else(|| {
            *backoff = unlimited();
            Duration::ZERO
        }))
    }
}

/// Starts the missing microVMs of a version, one after another, as long as it has provisioned
/// concurrency.
async fn keep(control: Weak<Control>, version: Arc<Version>) {
    let mut backoff = unlimited();
    while let Some(control) = control.upgrade() {
        let Some(pause) = control.provide_missing(&version, &mut backoff).await else { return };
        drop(control);
        tokio::time::sleep(pause).await;
    }
}

/// The waits after starts that failed.
fn unlimited() -> Backoff {
    let mut backoff = Backoff::since(Instant::now());
    backoff.limit(Duration::MAX);
    backoff
}
