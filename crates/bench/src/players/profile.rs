//! Profiles of players.

use std::path::Path;

use firn_base::error_chain;
use firn_memory::recorders::{self, Part};
use firn_run::player::record;
use firn_run::{Source, set_pooled_profile};
use firn_snapshot::{Profile, Snapshot, Verify, open_pooled, set_profile};
use firn_vmm::KVM_DEVICE;

use super::PlayersError;
use super::frozen::{FrozenPlayer, PooledPlayer};
use crate::player::PlayerInputs;
use crate::progress::Progress;

/// Records the profile of a player on the last of its inputs. A part that this host cannot record
/// is left out; planners that need it report that.
pub(super) fn learn(
    path: &Path,
    inputs: &PlayerInputs,
    progress: &dyn Progress,
) -> Result<Profile, PlayersError> {
    let source = Source::new(Snapshot::open(path)?, None);
    let input = inputs.iter().last().map(|trace| trace.name.as_str());
    let mut profile = source.snapshot().profile_or_empty()?;
    // If the trace does not list the free pages, no page counts as free.
    profile.free.get_or_insert_default();
    for recorder in recorders::of(&Part::ALL) {
        let kvm = Path::new(KVM_DEVICE).into();
        let recorded = record(&source, input, recorder, kvm, &mut profile);
        if let Err(error) = recorded {
            progress.note(&format!("a part of the profile is left out: {}", error_chain(&error)));
        }
    }
    Ok(profile)
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
