//! The kinds of guest: Linux, and the player.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_agent::protocol::{Pages, RoleCredentials};
use firn_memory::copy_ahead::WriteReport;
use firn_snapshot::Snapshot;
use firn_vmm::{HostConfig, Microvm, TracepointFormat};
use uuid::Uuid;

use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::life::{Mapped, Running};
use crate::outcome::Outcome;
use crate::report::StartReport;

/// What a start reports, and what it waits for, while it goes on. Methods are called from several
/// threads.
pub trait Listener: Send + Sync {
    /// The microVM is ready, has answered, or, a player, has ended with every page correct.
    fn started(&self, report: &StartReport);

    /// The function is about to get its event.
    fn asked(&self) {}

    /// The function has answered. The report follows once its rest is known, which can take as long
    /// as a loader works. Where a second invocation is recorded, this comes twice.
    fn answered(&self, _outcome: &Outcome) {}

    /// The guest has described what holds its pages.
    fn described(&self, _pages: Pages) {}

    /// A player has touched its last page. It checks all its memory when this returns.
    fn held(&self) {}

    /// KVM's tracepoints of a thread of this process, open.
    ///
    /// # Errors
    /// [`StartError::Record`]: they cannot be had.
    fn tracepoints(&self, _thread: u32) -> Result<(TracepointFormat, [OwnedFd; 2]), StartError> {
        Err(StartError::Spec("nothing was to be recorded".to_owned()))
    }

    /// What the microVM may take of memory, bytes: its guest's, and what its guest writes to its
    /// disk, if that is in memory. Comes before the guest's first instruction.
    fn sized(&self, _memory: u64, _disk: u64) {}

    /// Something that people should know and that fails nothing.
    fn note(&self, text: &str);
}

/// A kind of guest: what it needs of its host, and how its run goes from running vCPUs to its end.
pub(crate) trait GuestKind: Sized {
    /// What the microVM of a snapshot uses of its host.
    fn host(
        &mut self,
        snapshot: &Snapshot,
        descriptors: &mut Descriptors,
    ) -> Result<HostConfig, StartError>;

    /// Whether its memory tracks writes.
    fn tracks_writes(&self) -> bool {
        false
    }

    /// Changes the machine before it is restored.
    fn prepare(&mut self, _mapped: &mut Mapped<'_>) {}

    /// Looks at the complete microVM before its vCPUs run.
    fn restored(&mut self, _microvm: &Microvm, _listener: &Arc<dyn Listener>) {}

    /// Draws the identity of a microVM that was restored before its request, whose function gets
    /// these keys of its role. Returns its generation; `None` for a guest that has none.
    fn identify(
        &mut self,
        _credentials: Option<RoleCredentials>,
    ) -> Result<Option<Uuid>, StartError> {
        Ok(None)
    }

    /// Follows the running microVM to its end.
    fn follow(
        self,
        running: Running<'_>,
        listener: &Arc<dyn Listener>,
    ) -> Result<Ended, StartError>;
}

/// A run that has ended.
#[derive(Default)]
pub(crate) struct Ended {
    /// The report, where it was not given to the listener before the end.
    pub(crate) report: Option<Box<StartReport>>,
    /// What the run wrote, where it ran on copies.
    pub(crate) writes: Option<WriteReport>,
}
