//! Profiles of players.

use std::path::Path;
use std::time::Duration;

use firn_base::error_chain;
use firn_memory::recorders::{self, Part, ProfileRecorder};
use firn_run::jail::{Jail, JailMode};
use firn_run::monitor::Supervisor;
use firn_run::{
    Descriptors, OpenedFile, RecordError, RecordedThaw, RecordingHost, SourceSpec,
    set_pooled_profile,
};
use firn_snapshot::{Profile, Snapshot, Verify, open_pooled, set_profile};
use firn_vmm::KVM_DEVICE;

use super::PlayersError;
use super::frozen::{FrozenPlayer, PooledPlayer};
use crate::harness::Harness;
use crate::player::PlayerInputs;
use crate::progress::Progress;

/// Limit for a player to be restored.
const LIMIT: Duration = Duration::from_secs(60);

/// Records the profile of a player on the last of its inputs. A part that this host cannot record
/// is left out; planners that need it report that.
pub(super) fn learn(
    path: &Path,
    inputs: &PlayerInputs,
    harness: &Harness<'_>,
) -> Result<Profile, PlayersError> {
    let snapshot = Snapshot::open(path)?;
    let input = inputs.iter().last().map(|trace| trace.name.as_str());
    let mut profile = snapshot.profile_or_empty()?;
    // If the trace does not list the free pages, no page counts as free.
    profile.free.get_or_insert_default();
    let Harness { program, progress, .. } = harness;
    let host = Host { path, program, progress: *progress, jail: Jail::new(JailMode::Auto) };
    for recorder in recorders::of(&Part::ALL) {
        if let Err(error) = host.record(&snapshot, input, recorder, &mut profile) {
            host.note(&format!("a part of the profile is left out: {}", error_chain(&error)));
        }
    }
    Ok(profile)
}

/// Where recorded runs get their monitors.
pub(crate) struct Host<'a> {
    /// The directory of the snapshot.
    pub(crate) path: &'a Path,
    /// The `firn-monitor` program.
    pub(crate) program: &'a Path,
    pub(crate) progress: &'a dyn Progress,
    pub(crate) jail: Jail,
}

impl Host<'_> {
    /// Lets a player replay a trace, the first where `input` names none, under a recorder.
    pub(crate) fn record(
        &self,
        snapshot: &Snapshot,
        input: Option<&str>,
        recorder: ProfileRecorder,
        profile: &mut Profile,
    ) -> Result<(), RecordError> {
        let thaw = RecordedThaw {
            snapshot,
            event: None,
            input,
            freeze: None,
            software_kvm: false,
            limit: LIMIT,
        };
        thaw.record(recorder, self, profile).map(drop)
    }
}

impl RecordingHost for Host<'_> {
    type Error = RecordError;

    fn open(
        &self,
        descriptors: &mut Descriptors,
    ) -> Result<(SourceSpec, Option<OpenedFile>), RecordError> {
        Ok((SourceSpec::directory(self.path, descriptors)?, None))
    }

    fn spawn(&self) -> Result<Supervisor, RecordError> {
        Ok(Supervisor::spawn_in(&self.jail, self.program, KVM_DEVICE.as_ref())?)
    }

    fn note(&self, text: &str) {
        self.progress.note(text);
    }
}

/// Attaches a profile to a player with the same memory layout as the recorded player.
pub(super) fn attach(
    player: &FrozenPlayer,
    profile: &Profile,
    progress: &dyn Progress,
) -> Result<(), PlayersError> {
    let id = Snapshot::open(&player.snapshot)?.manifest().description.id;
    set_profile(&player.snapshot, &Profile { snapshot: id, ..profile.clone() })?;
    if let Some(PooledPlayer { socket, name }) = &player.pooled {
        let (pooled, grant) = open_pooled(socket, name, Verify::Never)?;
        let snapshot = pooled.manifest().description.id;
        drop((pooled, grant));
        let profile = Profile { snapshot, ..profile.clone() };
        if let Some(note) = set_pooled_profile(socket, name, &profile, None, None)? {
            progress.note(&note);
        }
    }
    Ok(())
}
