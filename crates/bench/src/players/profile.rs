//! Profiles of players.

use std::path::Path;

use firn_base::error_chain;
use firn_memory::copy_ahead::{Rule, prepare_copies};
use firn_memory::recorders::{self, Part};
use firn_snapshot::{AttachError, Profile, Snapshot, Verify, open_pooled, set_profile};
use firn_vmm::{KVM_DEVICE, Virtualization};

use super::PlayersError;
use super::frozen::{FrozenPlayer, PooledPlayer};
use crate::player::{PlayerInputs, record};
use crate::progress::Progress;

/// Records the profile of a player on the last of its inputs. A part that this host cannot record
/// is left out; planners that need it report that.
pub(super) fn learn(
    path: &Path,
    inputs: &PlayerInputs,
    progress: &dyn Progress,
) -> Result<Profile, PlayersError> {
    let snapshot = Snapshot::open(path)?;
    let input = inputs.iter().last().map(|trace| trace.name.as_str());
    let mut profile = snapshot.profile_or_empty()?;
    // If the trace does not list the free pages, no page counts as free.
    profile.free.get_or_insert_default();
    for recorder in recorders::of(&Part::ALL) {
        let recorded = record(&snapshot, input, recorder, KVM_DEVICE.as_ref(), &mut profile);
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
        attach_pooled(socket, name, &Profile { snapshot, ..profile.clone() }, progress)?;
    }
    Ok(())
}

/// Attaches a profile to a snapshot in a pool, and has the manager prepare a copy of the chunks
/// that the profile predicts, for the next start.
fn attach_pooled(
    socket: &Path,
    name: &str,
    profile: &Profile,
    progress: &dyn Progress,
) -> Result<(), AttachError> {
    firn_snapshot::set_pooled_profile(socket, name, profile)?;
    let nested = !matches!(Virtualization::detect(), Ok(Virtualization::Software));
    if let Err(error) = prepare_copies(socket, name, Rule::DEFAULT.for_paging(nested), profile) {
        let error = error_chain(&error);
        progress.note(&format!("chunks are copied at the first start, not in advance: {error}"));
    }
    Ok(())
}
