//! The snapshot of a start, opened.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_base::error_chain;
use firn_memory::copy_ahead::{Rule, WriteReport, learn, prepare_copies, request_copy};
use firn_memory::planners::{Planner, Store};
use firn_pool::{Client, Wanted};
use firn_snapshot::{
    AttachError, Checks, Grant, Profile, Signer, Snapshot, Verifier, Verify, open_for_start,
    open_pooled,
};
use firn_vmm::Virtualization;

use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::spec::SourceSpec;

/// A snapshot, and what its pool granted for one start.
///
/// This is the first state of a start: the next is [`Planned`](crate::Planned). Memory that is
/// mapped from a source must not outlive it.
pub struct Source {
    snapshot: Snapshot,
    /// What the pool granted; `None` for a snapshot in a directory.
    grant: Option<Grant>,
    /// What it took to open, the verification of a pool's bytes included.
    pub(crate) opening: Duration,
    /// Whether what a plan maps unchecked from files is verified first.
    pub(crate) verify: bool,
}

impl Source {
    /// Opens the snapshot that a spec names, for a planner: of a pool it takes what the planner
    /// maps, a replica or the sealed extent, and a copy of the chunks that the guest is expected to
    /// write, where the planner runs on one.
    ///
    /// # Errors
    /// [`StartError::Open`].
    pub fn open(
        spec: &SourceSpec,
        planner: &dyn Planner,
        descriptors: &mut Descriptors,
    ) -> Result<Self, StartError> {
        let begin = Instant::now();
        let source = match spec {
            SourceSpec::Directory { files, path, verify, verifier } => {
                let files = files
                    .clone()
                    .try_map(|slot| Ok::<_, StartError>(descriptors.take(slot)?.into()))?;
                let snapshot = Snapshot::of_files(files, path, verifier.as_deref())?;
                if *verify {
                    snapshot.check_signed_files()?;
                }
                let source = Self::new(snapshot, None);
                Self { verify: *verify, ..source }
            }
            SourceSpec::Pool { manager, name, verify, verifier } => {
                let stream = UnixStream::from(descriptors.take_manager(*manager)?);
                let manager = Client::from_stream(stream);
                let checks = Checks { bytes: *verify, signature: verifier.as_deref() };
                let (snapshot, grant) = open_granted(manager, name, checks, planner)?;
                Self::new(snapshot, Some(grant))
            }
        };
        Ok(Self { opening: begin.elapsed(), ..source })
    }

    /// The snapshot in a directory.
    ///
    /// # Errors
    /// [`StartError::Open`].
    pub fn open_directory(path: &Path) -> Result<Self, StartError> {
        Self::open_signed(path, None)
    }

    /// The same, if the verifier confirms it where there is one.
    ///
    /// # Errors
    /// [`StartError::Open`].
    pub fn open_signed(path: &Path, verifier: Option<&Verifier>) -> Result<Self, StartError> {
        let begin = Instant::now();
        let source = Self::new(Snapshot::open_signed(path, verifier)?, None);
        Ok(Self { opening: begin.elapsed(), ..source })
    }

    /// The snapshot `name` in the pool whose manager listens on `socket`, to look at: its sealed
    /// extent, without a copy.
    ///
    /// # Errors
    /// [`StartError::Open`].
    pub fn open_sealed<'a>(
        socket: &Path,
        name: &str,
        checks: impl Into<Checks<'a>>,
    ) -> Result<Self, StartError> {
        let begin = Instant::now();
        let (snapshot, grant) = open_pooled(socket, name, checks)?;
        Ok(Self { opening: begin.elapsed(), ..Self::new(snapshot, Some(grant)) })
    }

    /// A snapshot that is open already, and what its pool granted.
    #[must_use]
    pub fn new(snapshot: Snapshot, grant: Option<Grant>) -> Self {
        Self { snapshot, grant, opening: Duration::ZERO, verify: false }
    }

    /// The snapshot.
    #[must_use]
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// What the pool granted.
    #[must_use]
    pub fn grant(&self) -> Option<&Grant> {
        self.grant.as_ref()
    }

    /// Waits until the connection to the pool's manager reaches no more than what it granted.
    ///
    /// # Errors
    /// [`StartError::Open`].
    pub(crate) fn confined(&self) -> Result<(), StartError> {
        Ok(self.grant().map_or(Ok(()), Grant::confined)?)
    }

    /// Refuses a snapshot of a pool that was replaced or removed since it was opened. Of one in a
    /// directory, the process that opened its files finds out.
    ///
    /// # Errors
    /// [`StartError::Outdated`]; [`StartError::Open`]: the pool's manager does not answer.
    pub(crate) fn check_current(&self) -> Result<(), StartError> {
        let Some(grant) = &self.grant else { return Ok(()) };
        let path = self.snapshot.path().display().to_string();
        if grant.is_current()? { Ok(()) } else { Err(StartError::Outdated(path)) }
    }

    /// Adds what the run wrote to the pool's prediction, once the microVM has ended. The run
    /// succeeded whether or not this does: a failure is returned as a note.
    pub fn learn(&mut self, writes: Option<&WriteReport>) -> Option<String> {
        let (grant, writes) = (self.grant.as_mut()?, writes?);
        let error = learn(&self.snapshot, grant, &writes.written).err()?;
        Some(format!("the pool does not learn from this run: {}", error_chain(&error)))
    }
}

fn open_granted(
    manager: Client,
    name: &str,
    checks: Checks<'_>,
    planner: &dyn Planner,
) -> Result<(Snapshot, Grant), StartError> {
    let rule = planner.copy_rule().map(|rule| rule.for_paging(nested_paging()));
    let key = rule.map(Rule::key);
    let wanted = match (planner.store(), &key) {
        (Store::Replica, _) => Wanted::Replica,
        (Store::Directory | Store::Extent, Some(key)) => Wanted::Copy(key),
        (Store::Directory | Store::Extent, None) => Wanted::Snapshot,
    };
    let (snapshot, mut grant) = open_for_start(manager, name, checks, wanted)?;
    if let Some(rule) = rule {
        request_copy(&snapshot, &mut grant, rule)?;
    }
    // The connection must not reach more than this start was granted when the guest runs, which
    // waits for the manager's answer.
    grant.confine()?;
    Ok((snapshot, grant))
}

/// Whether KVM uses nested paging on this host.
pub(crate) fn nested_paging() -> bool {
    Virtualization::of_host() == Virtualization::Hardware
}

/// Attaches a profile to a snapshot in a pool, and has the manager prepare a copy of the chunks
/// that the profile predicts, for the next start. Returns a note where that failed: the first start
/// then prepares the copy. The verifier has to confirm the snapshot if there is one, and the
/// changed snapshot is signed if there is a signer.
///
/// # Errors
/// [`AttachError`]; the snapshot is as it was.
pub fn set_pooled_profile(
    socket: &Path,
    name: &str,
    profile: &Profile,
    verifier: Option<&Verifier>,
    signer: Option<&Signer>,
) -> Result<Option<String>, AttachError> {
    firn_snapshot::set_pooled_profile(socket, name, profile, verifier, signer)?;
    let rule = Rule::DEFAULT.for_paging(nested_paging());
    let own = signer.map(Signer::verifier);
    let checks = Checks { bytes: Verify::Never, signature: own.as_ref() };
    let prepared = prepare_copies(socket, name, checks, rule, profile);
    Ok(prepared.err().map(|error| {
        let error = error_chain(&error);
        format!("copies are made at the first start, not in advance: {error}")
    }))
}
