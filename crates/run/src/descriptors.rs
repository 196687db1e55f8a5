//! The open files that a start request refers to.

use std::fmt::{self, Debug, Formatter};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_snapshot::SnapshotDirectory;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::StartError;

/// The place of a descriptor among those that come with a [`StartSpec`](crate::StartSpec).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(u32);

/// The descriptors of a start request, each of which is taken once.
#[derive(Debug, Default)]
pub struct Descriptors {
    slots: Vec<Option<OwnedFd>>,
    /// A connection to a pool's manager that came before the request.
    manager: Option<OwnedFd>,
    /// The directory of the snapshot whose files are among them. It is not sent.
    directory: Option<Arc<SnapshotDirectory>>,
    /// What begins when they have been sent.
    later: Later,
}

/// Functions that begin the threads behind descriptors.
#[derive(Default)]
struct Later(Mutex<Vec<Begin>>);

type Begin = Box<dyn FnOnce() -> io::Result<()> + Send>;

impl Debug for Later {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Later").field(&self.0.lock().len()).finish()
    }
}

impl Descriptors {
    /// Adds a descriptor and returns its slot.
    pub fn add(&mut self, descriptor: impl Into<OwnedFd>) -> Slot {
        let slot = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        self.slots.push(Some(descriptor.into()));
        Slot(slot)
    }

    /// Begins a thread behind a descriptor as soon as the monitor, or the start in this process,
    /// has it: a start does not wait for the thread.
    pub(crate) fn after_sending(
        &mut self,
        begin: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) {
        self.later.0.get_mut().push(Box::new(begin));
    }

    /// Begins those threads, once.
    ///
    /// # Errors
    /// [`StartError::Session`]: a thread cannot be made.
    pub(crate) fn begin_threads(&self) -> Result<(), StartError> {
        let threads = std::mem::take(&mut *self.later.0.lock());
        let begun = threads.into_iter().try_for_each(|begin| begin());
        begun.map_err(|error| StartError::session("start a thread", error))
    }

    /// Keeps the directory of the snapshot whose files were added.
    pub(crate) fn keep_directory(&mut self, directory: SnapshotDirectory) {
        self.directory = Some(Arc::new(directory));
    }

    /// The directory that was kept.
    pub(crate) fn directory(&self) -> Option<Arc<SnapshotDirectory>> {
        self.directory.clone()
    }

    /// Takes the descriptor in a slot.
    ///
    /// # Errors
    /// [`StartError::Spec`]: no descriptor came for the slot, or it was taken before.
    pub(crate) fn take(&mut self, slot: Slot) -> Result<OwnedFd, StartError> {
        let index = usize::try_from(slot.0).unwrap_or(usize::MAX);
        let descriptor = self.slots.get_mut(index).and_then(Option::take);
        descriptor
            .ok_or_else(|| StartError::Spec(format!("no descriptor came for slot {}", slot.0)))
    }

    /// The same for an optional slot of a file.
    pub(crate) fn take_file(&mut self, slot: Option<Slot>) -> Result<Option<File>, StartError> {
        slot.map(|slot| self.take(slot).map(File::from)).transpose()
    }

    /// Adds the connection that a standby monitor got in advance.
    pub(crate) fn with_manager(self, manager: Option<OwnedFd>) -> Self {
        Self { manager, ..self }
    }

    /// Takes the connection to the pool's manager: the one in the slot, or the one that came in
    /// advance.
    pub(crate) fn take_manager(&mut self, slot: Option<Slot>) -> Result<OwnedFd, StartError> {
        match slot {
            Some(slot) => self.take(slot),
            None => self.manager.take().ok_or_else(|| {
                StartError::Spec("no connection to a pool's manager came in advance".to_owned())
            }),
        }
    }

    /// All descriptors, in the order of their slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &OwnedFd> {
        self.slots.iter().flatten()
    }
}

impl From<Vec<OwnedFd>> for Descriptors {
    fn from(descriptors: Vec<OwnedFd>) -> Self {
        Self { slots: descriptors.into_iter().map(Some).collect(), ..Self::default() }
    }
}
