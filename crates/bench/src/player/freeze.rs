//! Builds a player from traces, and freezes it before its first instruction.

use std::path::Path;

use firn_base::PAGE_SIZE;
use firn_memory::{AnonymousError, DiscardError, GuestMemory};
use firn_player::format::{OWN, PROGRAM};
use firn_snapshot::{
    AttachError, Destination, FreezeReport, FreezeRequest, FunctionInfo, NotFrozenError, OpenError,
    Profile, Signer, Snapshot, set_profile, sign,
};
use firn_vmm::{FreezeError, Microvm, OpenKvm, OpenKvmError, PrepareError, UserRegisters};
use thiserror::Error;

use super::inputs::PlayerInputs;
use super::memory::{OwnRegion, PlayerMemoryError, Surroundings, fill};
use super::options::PlayerOptions;

/// Why a player cannot be frozen.
#[derive(Debug, Error)]
pub enum FreezePlayerError {
    /// The player's memory cannot be built from the traces.
    #[error(transparent)]
    Memory(#[from] PlayerMemoryError),
    /// The player's memory cannot be allocated.
    #[error("cannot allocate the player's memory")]
    Reserve(#[from] AnonymousError),
    /// KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] OpenKvmError),
    /// The microVM cannot be created.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// Its free pages cannot be discarded.
    #[error("cannot discard the player's free pages")]
    Discard(#[from] DiscardError),
    /// The snapshot cannot be written.
    #[error(transparent)]
    Freeze(#[from] NotFrozenError<FreezeError>),
    /// The written snapshot cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its free pages cannot be added to its profile.
    #[error(transparent)]
    Profile(#[from] AttachError),
}

/// Builds a player that replays any of `inputs`, and freezes it before its first instruction into
/// the snapshot `destination`. With `dense`, a snapshot in a directory stores zero pages too. If
/// the traces list the pages that the guest held free, the profile of a snapshot in a directory
/// lists them too.
///
/// # Errors
/// See [`FreezePlayerError`]. A snapshot that was there before is whole then.
pub fn freeze(
    inputs: &PlayerInputs,
    options: &PlayerOptions,
    kvm: &Path,
    destination: Destination,
    dense: bool,
) -> Result<FreezeReport, FreezePlayerError> {
    freeze_signed(inputs, options, kvm, destination, dense, None)
}

/// The same, with a signature if there is a signer.
///
/// # Errors
/// See [`FreezePlayerError`].
pub fn freeze_signed(
    inputs: &PlayerInputs,
    options: &PlayerOptions,
    kvm: &Path,
    destination: Destination,
    dense: bool,
    signer: Option<&Signer>,
) -> Result<FreezeReport, FreezePlayerError> {
    let (mut microvm, function) = prepare(inputs, options, kvm)?;
    let path = match &destination {
        Destination::Directory(path) => Some(path.clone()),
        Destination::Pool { .. } => None,
    };
    let request = FreezeRequest { destination, dense, function: Some(function) };
    let report = firn_snapshot::freeze_signed(&mut microvm, request, signer)?;
    if let (Some(path), Some(free)) = (path, inputs.free()) {
        let snapshot = Snapshot::open(&path)?;
        let profile = snapshot.profile_or_empty()?;
        set_profile(&path, &Profile { free: Some(free.to_ranges()), ..profile })?;
        signer.map_or(Ok(()), |signer| sign(&path, signer))?;
    }
    Ok(report)
}

/// A player before its first instruction, and its description for the manifest.
pub(crate) fn prepare(
    inputs: &PlayerInputs,
    options: &PlayerOptions,
    kvm: &Path,
) -> Result<(Microvm, FunctionInfo), FreezePlayerError> {
    // The monitor does not write to a player's memory, so the player checks every byte of it.
    let surroundings = Surroundings { unchecked: (0, 0), boot: false, reports: 0, tsc_khz: 0 };
    let own = OwnRegion::new(inputs, options, surroundings)?;
    let memory = GuestMemory::anonymous(own.layout(inputs).map_err(PlayerMemoryError::from)?)?;
    {
        let view = memory.vm_memory();
        own.write(&view).map_err(PlayerMemoryError::from)?;
        fill(&view, inputs, options).map_err(PlayerMemoryError::from)?;
    }
    if options.sanitised {
        report_free(&memory, inputs)?;
    }
    let [digest, len] = own.arguments;
    let registers = UserRegisters {
        page_tables: own.page_tables,
        instruction: OWN + PROGRAM,
        stack: own.stack,
        arguments: [digest, len, 0, 0],
    };
    let microvm = Microvm::prepare(
        memory,
        &[registers],
        OpenKvm::open(kvm)?,
        firn_run::player::host(Vec::new()),
    )?;
    let function =
        FunctionInfo { name: inputs.names(), handler: firn_run::player::HANDLER.to_owned() };
    Ok((microvm, function))
}

/// Discards the pages that are free and zero, as a balloon does whose guest reports every free
/// page. Free pages that were not zero at the recording had not been reported.
fn report_free(memory: &GuestMemory, inputs: &PlayerInputs) -> Result<(), DiscardError> {
    let (Some(free), zero) = (inputs.free(), inputs.zero_map(true)) else { return Ok(()) };
    for region in inputs.layout().regions() {
        let free = free.ranges_in(region.image_pages());
        for pages in free.flat_map(|pages| zero.ranges_in(pages)) {
            let start = pages.start * PAGE_SIZE - region.image_offset + region.guest_addr;
            memory.discard(start, (pages.end - pages.start) * PAGE_SIZE)?;
        }
    }
    Ok(())
}
