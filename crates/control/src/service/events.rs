//! Accepted events: a long one is stored in a file until it is served.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_run::Invocation;
use tempfile::TempPath;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::errors::EventRefused;
use crate::blocking::{TaskFailed, blocking};

/// The longest event that is kept in memory while it waits, bytes.
const MAX_KEPT: usize = 16 << 10;

/// Limit of stored events in memory at the same time, bytes: those being served.
const MAX_LOADED: usize = 64 << 20;

/// The names of stored events begin with it.
const PREFIX: &str = "event-";

/// The unit of the limits of bytes: [`MAX_KEPT`], so that a short event counts as one.
const UNIT: usize = MAX_KEPT;

/// The limits of accepted events, and the folder with the long ones.
#[derive(Debug)]
pub(super) struct Events {
    folder: PathBuf,
    /// One permit for each event.
    places: Arc<Semaphore>,
    /// One permit for each [`UNIT`] of all events.
    accepted: Arc<Semaphore>,
    /// One permit for each [`UNIT`] of the stored events in memory.
    loaded: Arc<Semaphore>,
}

/// An accepted event.
#[derive(Debug)]
pub(super) struct Event {
    invocation: Invocation,
    stored: Option<TempPath>,
    units: u32,
    loaded: Arc<Semaphore>,
    _permits: [OwnedSemaphorePermit; 2],
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
    Damaged(#[source] firn_run::EventError),
    #[error("the daemon stops")]
    Closed(#[from] tokio::sync::AcquireError),
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

impl Events {
    /// Removes the events of an earlier daemon, which are lost.
    pub(super) fn open(data: &Path, places: usize, bytes: u64) -> io::Result<Self> {
        let folder = data.join("events");
        fs::create_dir_all(&folder)?;
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()) {
                fs::remove_file(entry.path())?;
            }
        }
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

    pub(super) async fn accept(&self, mut invocation: Invocation) -> Result<Event, EventRefused> {
        let length = invocation.event().len();
        let units = u32::try_from(length.div_ceil(UNIT)).unwrap_or(u32::MAX).max(1);
        let too_many = |_| EventRefused::TooMany;
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(too_many)?;
        let bytes = Arc::clone(&self.accepted).try_acquire_many_owned(units).map_err(too_many)?;
        let mut stored = None;
        if length > MAX_KEPT {
            let (text, folder) = (invocation.take_event(), self.folder.clone());
            stored = Some(
                blocking(move || {
                    let mut file = tempfile::Builder::new()
                        .prefix(PREFIX)
                        .tempfile_in(folder)
                        .map_err(EventRefused::Store)?;
                    file.write_all(text.as_bytes()).map_err(EventRefused::Store)?;
                    // Without the descriptor: there may be many events.
                    Ok::<_, EventRefused>(file.into_temp_path())
                })
                .await?,
            );
        }
        let loaded = Arc::clone(&self.loaded);
        Ok(Event { invocation, stored, units, loaded, _permits: [place, bytes] })
    }
}

impl Event {
    pub(super) fn request_id(&self) -> &str {
        self.invocation.request_id()
    }

    /// The event for one attempt. Waits while the stored events in memory have reached their limit.
    pub(super) async fn load(&self) -> Result<Loaded, LoadError> {
        let mut invocation = self.invocation.clone();
        let Some(stored) = &self.stored else {
            return Ok(Loaded { invocation: Arc::new(invocation), _permit: None });
        };
        let permit = Arc::clone(&self.loaded).acquire_many_owned(self.units).await?;
        let path = stored.to_path_buf();
        let text = blocking(move || fs::read_to_string(path).map_err(LoadError::Read)).await?;
        invocation.set_event(text).map_err(LoadError::Damaged)?;
        Ok(Loaded { invocation: Arc::new(invocation), _permit: Some(permit) })
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
