//! Accepted events: each is in a file of its own until it is served, for this daemon or the next.

use std::fs::{self, File};
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firn_run::Invocation;
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::errors::EventRefused;
use crate::blocking::{TaskFailed, blocking};
use crate::functions::Target;

/// The longest event that is kept in memory while it waits, bytes.
const MAX_KEPT: usize = 16 << 10;

/// Limit of stored events in memory at the same time, bytes: those being served.
const MAX_LOADED: usize = 64 << 20;

/// The names of stored events begin with it.
const PREFIX: &str = "event-";

/// The names of events that are being stored begin with it: they are not accepted yet.
const NEW_PREFIX: &str = "new-event-";

/// The unit of the limits of bytes: [`MAX_KEPT`], so that a short event counts as one.
const UNIT: usize = MAX_KEPT;

/// The limits of accepted events, and the folder with them.
#[derive(Debug)]
pub(super) struct Events {
    folder: PathBuf,
    /// One permit for each event.
    places: Arc<Semaphore>,
    /// One permit for each [`UNIT`] of all events.
    accepted: Arc<Semaphore>,
    /// One permit for each [`UNIT`] of the long events in memory.
    loaded: Arc<Semaphore>,
}

/// An accepted event. Its file remains until it is [done](Event::done).
#[derive(Debug)]
pub(super) struct Event {
    target: Target,
    accepted_ms: u64,
    hops: u32,
    /// Without the event itself if that is long.
    invocation: Invocation,
    path: PathBuf,
    /// The units that it takes in memory while it is served; 0 if it is there all the time.
    units: u32,
    loaded: Arc<Semaphore>,
    _permits: Vec<OwnedSemaphorePermit>,
}

/// The content of an event's file.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Stored {
    target: Target,
    /// When it was accepted, ms since 1970.
    accepted_ms: u64,
    invocation: Invocation,
    /// How many events came before it, each from the record of the one before.
    #[serde(default)]
    hops: u32,
}

/// An event in memory.
#[derive(Debug)]
pub(super) struct Loaded {
    invocation: Arc<Invocation>,
    _permit: Option<OwnedSemaphorePermit>,
}

/// A stored event cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    #[error("cannot read the stored event")]
    Read(#[source] io::Error),
    #[error("the stored event is damaged")]
    Damaged(#[source] serde_json::Error),
    #[error("the daemon stops")]
    Closed(#[from] tokio::sync::AcquireError),
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

impl Events {
    /// Opens the folder with the events in `data`.
    pub(super) fn open(data: &Path, places: usize, bytes: u64) -> io::Result<Self> {
        let folder = data.join("events");
        fs::create_dir_all(&folder)?;
        let units = usize::try_from(bytes).unwrap_or(usize::MAX) / UNIT;
        let semaphore =
            |permits: usize| Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS)));
        Ok(Self {
            folder,
            places: semaphore(places),
            accepted: semaphore(units),
            loaded: semaphore(MAX_LOADED / UNIT),
        })
    }

    /// The folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The events that earlier daemons have accepted and not served. They count towards the limits,
    /// and are there even beyond them. A damaged one stays where it is.
    pub(super) fn recover(&self) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            if name.starts_with(NEW_PREFIX.as_bytes()) {
                fs::remove_file(&path)?;
            } else if name.starts_with(PREFIX.as_bytes()) {
                match read(&path) {
                    Ok(stored) => events.push(self.recovered(stored, path)),
                    Err(error) => {
                        let error: &dyn std::error::Error = &error;
                        tracing::error!(?path, error, "an accepted event cannot be served");
                    }
                }
            }
        }
        events.sort_by_key(|event| event.accepted_ms);
        Ok(events)
    }

    fn recovered(&self, stored: Stored, path: PathBuf) -> Event {
        let units = units_of(&stored.invocation);
        let place = Arc::clone(&self.places).try_acquire_owned();
        let bytes = Arc::clone(&self.accepted).try_acquire_many_owned(units);
        self.event(stored, path, [place, bytes].into_iter().flatten().collect())
    }

    /// Accepts an event of a client. See [`Events::accept_after`].
    pub(super) async fn accept(
        &self,
        target: Target,
        invocation: Invocation,
    ) -> Result<Event, EventRefused> {
        self.accept_after(0, target, invocation).await
    }

    /// Accepts an event that follows `hops` others: once this returns, only [`Event::done`] ends
    /// it.
    pub(super) async fn accept_after(
        &self,
        hops: u32,
        target: Target,
        invocation: Invocation,
    ) -> Result<Event, EventRefused> {
        let units = units_of(&invocation);
        let too_many = |_| EventRefused::TooMany;
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(too_many)?;
        let bytes = Arc::clone(&self.accepted).try_acquire_many_owned(units).map_err(too_many)?;
        let since = UNIX_EPOCH.elapsed().unwrap_or_default();
        let accepted_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let (stored, folder) =
            (Stored { target, accepted_ms, invocation, hops }, self.folder.clone());
        let (stored, path) = blocking(move || {
            let path = write(&stored, &folder).map_err(EventRefused::Store)?;
            Ok::<_, EventRefused>((stored, path))
        })
        .await?;
        Ok(self.event(stored, path, vec![place, bytes]))
    }

    fn event(&self, stored: Stored, path: PathBuf, permits: Vec<OwnedSemaphorePermit>) -> Event {
        let Stored { target, accepted_ms, mut invocation, hops } = stored;
        let mut units = 0;
        if invocation.event().len() > MAX_KEPT {
            units = units_of(&invocation);
            invocation.forget_event();
        }
        let loaded = Arc::clone(&self.loaded);
        Event { target, accepted_ms, hops, invocation, path, units, loaded, _permits: permits }
    }
}

fn units_of(invocation: &Invocation) -> u32 {
    u32::try_from(invocation.event().len().div_ceil(UNIT)).unwrap_or(u32::MAX).max(1)
}

/// Writes an event to its file, durably.
fn write(stored: &Stored, folder: &Path) -> io::Result<PathBuf> {
    let mut file = tempfile::Builder::new().prefix(NEW_PREFIX).tempfile_in(folder)?;
    file.write_all(&serde_json::to_vec(stored)?)?;
    file.as_file().sync_all()?;
    let path = folder.join(format!("{PREFIX}{}", stored.invocation.request_id()));
    file.persist_noclobber(&path)?;
    File::open(folder)?.sync_all()?;
    Ok(path)
}

fn read(path: &Path) -> Result<Stored, LoadError> {
    let file = File::open(path).map_err(LoadError::Read)?;
    serde_json::from_reader(BufReader::new(file)).map_err(LoadError::Damaged)
}

impl Event {
    /// The function or version that it is for.
    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    pub(super) fn request_id(&self) -> &str {
        self.invocation.request_id()
    }

    /// How many events came before it.
    pub(super) fn hops(&self) -> u32 {
        self.hops
    }

    /// The same, accepted earlier.
    #[cfg(test)]
    pub(super) fn aged(mut self, age: Duration) -> Self {
        self.accepted_ms -= u64::try_from(age.as_millis()).unwrap();
        self
    }

    /// How long ago it was accepted, by the wall clock.
    pub(super) fn age(&self) -> Duration {
        let accepted = UNIX_EPOCH + Duration::from_millis(self.accepted_ms);
        SystemTime::now().duration_since(accepted).unwrap_or_default()
    }

    /// The event for one attempt. Waits while the long events in memory have reached their limit.
    pub(super) async fn load(&self) -> Result<Loaded, LoadError> {
        if self.units == 0 {
            let invocation = Arc::new(self.invocation.clone());
            return Ok(Loaded { invocation, _permit: None });
        }
        let permit = Arc::clone(&self.loaded).acquire_many_owned(self.units).await?;
        let path = self.path.clone();
        let stored = blocking(move || read(&path)).await?;
        Ok(Loaded { invocation: Arc::new(stored.invocation), _permit: Some(permit) })
    }

    /// Removes it: it was served, or it is given up.
    pub(super) async fn done(self) {
        let path = self.path.clone();
        let removed = blocking(move || fs::remove_file(path).map_err(LoadError::Read)).await;
        if let Err(error) = removed {
            // The next daemon serves it again.
            let (error, path): (&dyn std::error::Error, _) = (&error, &self.path);
            tracing::error!(?path, error, "an event that has ended cannot be removed");
        }
    }
}

impl Loaded {
    pub(super) fn invocation(&self) -> Arc<Invocation> {
        Arc::clone(&self.invocation)
    }
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
