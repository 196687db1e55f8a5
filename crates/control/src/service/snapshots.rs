//! Snapshots of published versions: freeze, purge, and recovery after a restart.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_base::error_chain;

use super::backoff::Backoff;
use super::errors::FindError;
use super::{Control, OpenError};
use crate::blocking::blocking;
use crate::functions::{SnapshotPlace, Version, VersionSnapshot, VersionState, is_snapshot_name};
use crate::instances::{Frozen, PublishFailure, publish};
use crate::store::{Change, StoreError};

/// How many microVMs the freeze of a version may lose before it fails.
const LOST: u32 = 2;

/// For how long after the start of this daemon a monitor of an earlier one may publish a snapshot.
const STRAGGLERS: Duration = Duration::from_secs(60);

impl Control {
    /// Resumes the work of an earlier daemon: freezes pending versions, serves accepted events,
    /// starts provisioned microVMs, and removes unused snapshots and code.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub async fn recover(self: &Arc<Self>) -> Result<(), OpenError> {
        let mut used = HashSet::new();
        for version in self.all_versions()? {
            if let Some(SnapshotPlace::Directory(name)) =
                version.snapshot.as_ref().map(|snapshot| &snapshot.place)
            {
                used.insert(name.clone());
            }
            if version.state == VersionState::Pending {
                tokio::spawn(Arc::clone(self).freeze(version));
            }
        }
        let snapshots = &self.fleet.launcher.snapshots;
        sweep(snapshots, &used)
            .map_err(|source| OpenError::Data { path: snapshots.clone(), source })?;
        for name in self.store.to_purge()? {
            let purging = Arc::clone(self).purge_later(SnapshotPlace::Pool(name), STRAGGLERS);
            tokio::spawn(purging);
        }
        self.sweep_code().await;
        self.keep_provisioned();
        let path = self.events.folder();
        self.recover_events().map_err(|source| OpenError::Data { path: path.to_owned(), source })
    }

    /// Freezes a version, and stores the result. Ends with the version if it is deleted. Purges
    /// what the freeze published if no version uses it.
    pub(super) async fn freeze(self: Arc<Self>, version: Version) {
        let (name, number) = (version.function.clone(), version.version.clone());
        tracing::info!(function = name, version = number, "freezing");
        let place = self.fleet.launcher.place(&version);
        // Dropping the freeze kills its microVM.
        let frozen = tokio::select! {
            frozen = self.publish_and_plan(&version) => Some(frozen),
            () = self.until_deleted(&version) => None,
        };
        let (state, snapshot) = match frozen {
            Some(Ok(snapshot)) => {
                let VersionSnapshot { planner, bytes, .. } = &snapshot;
                tracing::info!(function = name, version = number, bytes, planner, "frozen");
                (VersionState::Active, Some(snapshot))
            }
            // The next daemon freezes it.
            Some(Err(_)) if self.fleet.is_closed() => return,
            Some(Err(error)) => {
                let error: &(dyn std::error::Error + 'static) = &error;
                tracing::warn!(function = name, version = number, error, "not frozen");
                (VersionState::Failed { reason: error_chain(error) }, None)
            }
            None => {
                tracing::info!(function = name, version = number, "deleted while it froze");
                return self.purge_later(place, STRAGGLERS).await;
            }
        };
        let frozen = snapshot.is_some();
        let store = |found| Version { state, waiting: None, snapshot, ..found };
        let stored = self.change_version(version, store).await;
        // The version was deleted meanwhile, or the database failed.
        if !(frozen && matches!(stored, Ok(true))) {
            self.purge_later(place, STRAGGLERS).await;
        }
    }

    async fn publish_and_plan(
        self: &Arc<Self>,
        version: &Version,
    ) -> Result<VersionSnapshot, PublishFailure> {
        let frozen = self.publish_when_free(version).await?;
        self.plan_when_recorded(version, frozen).await
    }

    /// Returns when a version is deleted.
    async fn until_deleted(self: &Arc<Self>, version: &Version) {
        loop {
            // Deletions from now on count.
            let deletion = self.deletions.notified();
            let control = Arc::clone(self);
            let (name, number) = (version.function.clone(), version.version.clone());
            let find = move || Ok::<_, FindError>(control.store.version(&name, &number)?);
            let found = blocking(find).await;
            // If the database failed, the change that stores the freeze's result finds out.
            if let Ok(found) = found
                && found.is_none_or(|found| found.revision != version.revision)
            {
                return;
            }
            deletion.await;
        }
    }

    /// Freezes a version. Tries again if it waited too long for a microVM, lost one, or found no
    /// space that deleted versions still take, and stores why.
    async fn publish_when_free(
        self: &Arc<Self>,
        version: &Version,
    ) -> Result<Frozen, PublishFailure> {
        let mut backoff = Backoff::since(Instant::now());
        let (mut attempts, mut lost) = (0, 0);
        loop {
            attempts += 1;
            let (fleet, code) = (Arc::clone(&self.fleet), self.code.clone());
            let published = publish(fleet, code, Arc::new(version.clone())).await;
            let error = match published {
                Err(error) if self.is_passing(&error, &mut lost) => error,
                published => return published,
            };
            let waiting =
                format!("attempt {attempts} to freeze it failed: {}", error_chain(&error));
            let Some(pause) = backoff.next() else {
                let source = Box::new(error);
                return Err(PublishFailure::NeverFree { attempts, source });
            };
            self.wait(version, waiting, pause).await;
        }
    }

    /// Chooses the planner of a frozen version. Tries again a few times, because the monitor that
    /// plans can be lost, and longer for a planner that needs a recording.
    async fn plan_when_recorded(
        self: &Arc<Self>,
        version: &Version,
        Frozen { place, bytes }: Frozen,
    ) -> Result<VersionSnapshot, PublishFailure> {
        let mut backoff = Backoff::since(Instant::now());
        let directory = match &place {
            SnapshotPlace::Directory(name) => Some(self.fleet.launcher.snapshots.join(name)),
            SnapshotPlace::Pool(_) => None,
        };
        let recorded = directory.filter(|_| version.needs_recording());
        let mut attempts = 0;
        loop {
            attempts += 1;
            let chosen = self.fleet.launcher.choose_planner(version, &place).await;
            let error = match chosen {
                Ok((planner, root)) => {
                    let network = self.fleet.launcher.has_network(version);
                    let root = Some(root);
                    return Ok(VersionSnapshot { place, bytes, planner, root, network });
                }
                // The next daemon freezes it.
                Err(error) if self.fleet.is_closed() => return Err(error.into()),
                Err(error) => error,
            };
            let reason = error_chain(&error);
            let waiting = match &recorded {
                Some(path) => format!("waits for a recording of {}: {reason}", path.display()),
                None => format!("attempt {attempts} to plan its thaw failed: {reason}"),
            };
            let tries = recorded.is_some() || attempts <= LOST;
            let Some(pause) = backoff.next().filter(|_| tries) else {
                return Err(error.into());
            };
            self.wait(version, waiting, pause).await;
        }
    }

    /// Stores why a version waits, and waits.
    async fn wait(self: &Arc<Self>, version: &Version, waiting: String, pause: Duration) {
        tracing::warn!(
            function = version.function,
            version = version.version,
            waiting,
            next_seconds = pause.as_secs(),
            "not frozen yet"
        );
        let store = |found| Version { waiting: Some(waiting), ..found };
        // The next wait stores its reason.
        let _ = self.change_version(version.clone(), store).await;
        tokio::time::sleep(pause).await;
    }

    /// Whether a later attempt can succeed: there was no microVM or no manager of the pool for it,
    /// the snapshots of deleted versions are still in its way, or it has `lost` its own, or the
    /// pool's manager, a few times only.
    fn is_passing(&self, error: &PublishFailure, lost: &mut u32) -> bool {
        if let PublishFailure::Acquire(error) = error {
            return error.is_throttling();
        }
        let purges = || self.store.to_purge().is_ok_and(|names| !names.is_empty());
        if error.is_of_earlier_clients() || error.is_of_place() && purges() {
            return !self.fleet.is_closed();
        }
        *lost += 1;
        *lost <= LOST && !error.is_of_function() && !self.fleet.is_closed()
    }

    /// Changes a version. Returns false if it was deleted.
    async fn change_version(
        self: &Arc<Self>,
        version: Version,
        work: impl FnOnce(Version) -> Version + Send + 'static,
    ) -> Result<bool, FindError> {
        let control = Arc::clone(self);
        blocking(move || {
            control.store.change(|change| {
                let number = version.version.parse().unwrap_or_default();
                let found = change.version(&version.function, number)?;
                let Some(found) = found.filter(|found| found.revision == version.revision) else {
                    return Ok(false);
                };
                let changed = work(found);
                if let VersionState::Failed { .. } = changed.state {
                    // The freeze may have published the snapshot before it failed.
                    control.schedule_purge(change, &version)?;
                }
                change.put_version(&version.function, number, &changed)?;
                Ok(true)
            })
        })
        .await
    }

    /// Ends the microVMs of a deleted version, and purges its snapshot.
    pub(super) async fn forget(self: &Arc<Self>, version: Version) {
        self.fleet.retire(version.revision);
        self.deletions.notify_waiters();
        if let Some(snapshot) = version.snapshot {
            match self.fleet.launcher.remove(&snapshot.place).await {
                Ok(()) => self.purged(snapshot.place).await,
                Err(_) => {
                    let purging = Arc::clone(self).purge_later(snapshot.place, Duration::ZERO);
                    tokio::spawn(purging);
                }
            }
        }
    }

    /// Records, in the transaction that deletes a version or makes it fail, that its snapshot in
    /// the pool has to be purged. The daemon may end before it has purged the snapshot.
    pub(super) fn schedule_purge(
        &self,
        change: &Change,
        version: &Version,
    ) -> Result<(), StoreError> {
        let place = match version.state {
            // A freeze in progress may still store the snapshot.
            VersionState::Pending => Some(self.fleet.launcher.place(version)),
            _ => version.snapshot.as_ref().map(|snapshot| snapshot.place.clone()),
        };
        match place {
            Some(SnapshotPlace::Pool(name)) => change.purge(&name),
            _ => Ok(()),
        }
    }

    /// Purges a snapshot that no version uses, as soon as its medium lets it: no manager can open a
    /// pool that microVMs of an earlier one use. A snapshot that is missing may be published until
    /// `stragglers` have passed.
    async fn purge_later(self: Arc<Self>, place: SnapshotPlace, stragglers: Duration) {
        let begin = Instant::now();
        let mut backoff = Backoff::since(begin);
        while let Err(error) = self.fleet.launcher.remove(&place).await {
            if !error.is_missing() {
                let error: &(dyn std::error::Error + 'static) = &error;
                tracing::warn!(?place, error, "cannot remove a snapshot");
            } else if begin.elapsed() >= stragglers {
                break;
            }
            // After the last wait, the next daemon tries it.
            let Some(pause) = backoff.next() else { return };
            tokio::time::sleep(pause).await;
        }
        self.purged(place).await;
    }

    /// Records that a snapshot was purged.
    async fn purged(self: &Arc<Self>, place: SnapshotPlace) {
        let SnapshotPlace::Pool(name) = place else { return };
        let control = Arc::clone(self);
        let recorded =
            blocking(move || Ok::<_, FindError>(control.store.delete(|c| c.purged(&name))?));
        if let Err(error) = recorded.await {
            // The next start of the daemon tries to purge the snapshot again, which has no effect.
            let error: &(dyn std::error::Error + 'static) = &error;
            tracing::error!(error, "cannot record that a snapshot was purged");
        }
    }
}

/// Removes the snapshots in `folder` that are not `used`. Everything else there stays.
fn sweep(folder: &Path, used: &HashSet<String>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let unused = |name: &str| is_snapshot_name(name) && !used.contains(name);
        if entry.file_name().to_str().is_some_and(unused) && entry.file_type()?.is_dir() {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "snapshots_tests.rs"]
mod tests;
