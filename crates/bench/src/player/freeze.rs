//! From traces to the snapshot of a player that has not begun.

use std::path::Path;

use firn_base::PAGE_SIZE;
use firn_memory::{AnonymousError, DiscardError, GuestMemory};
use firn_player::format::{OWN, PROGRAM};
use firn_snapshot::{
    AttachError, FunctionInfo, OpenError, Profile, Snapshot, runs_of, set_profile,
};
use firn_vmm::{
    Destination, FreezeError, FreezeReport, FreezeRequest, Microvm, OpenKvm, OpenKvmError,
    PrepareError, UserRegisters,
};
use thiserror::Error;

use super::inputs::PlayerInputs;
use super::memory::{OwnRegion, PlayerMemoryError, Surroundings, fill};
use super::options::PlayerOptions;

/// Why no snapshot of a player was made.
#[derive(Debug, Error)]
pub enum FreezePlayerError {
    /// The traces cannot be made into a player.
    #[error(transparent)]
    Memory(#[from] PlayerMemoryError),
    /// There is no room for the player's memory.
    #[error("reserving the player's memory")]
    Reserve(#[from] AnonymousError),
    /// KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] OpenKvmError),
    /// The microVM could not be made.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// Its free pages could not be given back.
    #[error("giving back the player's free pages")]
    Discard(#[from] DiscardError),
    /// The snapshot could not be written.
    #[error(transparent)]
    Freeze(#[from] FreezeError),
    /// The snapshot that was just written is refused.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its free pages could not be put into its profile.
    #[error(transparent)]
    Profile(#[from] AttachError),
}

/// Makes a player that repeats any of `inputs` and freezes it before its first instruction into the
/// snapshot `destination`; `dense` stores its zero pages in a directory too. Where the traces say
/// which pages the guest held free, the profile of a snapshot in a directory does, too.
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
    let (mut microvm, function) = prepare(inputs, options, kvm)?;
    let path = match &destination {
        Destination::Directory(path) => Some(path.clone()),
        Destination::Pool { .. } => None,
    };
    let report = microvm.freeze(FreezeRequest { destination, dense, function: Some(function) })?;
    if let (Some(path), Some(free)) = (path, inputs.free()) {
        let snapshot = Snapshot::open(&path)?;
        let profile = snapshot.profile_or_empty()?;
        set_profile(&path, &Profile { free: Some(runs_of(free)), ..profile })?;
    }
    Ok(report)
}

/// A player before its first instruction, and what its manifest says of it.
fn prepare(
    inputs: &PlayerInputs,
    options: &PlayerOptions,
    kvm: &Path,
) -> Result<(Microvm, FunctionInfo), FreezePlayerError> {
    // The monitor writes nothing into a player's memory, so every byte of it is checked.
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

/// Gives back the pages that are free and zero, as a balloon does whose guest reports every single
/// one. What is free and was not zero when the trace was recorded had not been reported.
fn report_free(memory: &GuestMemory, inputs: &PlayerInputs) -> Result<(), DiscardError> {
    let (Some(free), zero) = (inputs.free(), inputs.zero_map(true)) else { return Ok(()) };
    for region in inputs.layout().regions() {
        let free = free.spans(region.image_pages()).filter(|span| span.set);
        for span in free.flat_map(|span| zero.spans(span.pages)).filter(|span| span.set) {
            let start = span.pages.start * PAGE_SIZE - region.image_offset + region.guest_addr;
            memory.discard(start, (span.pages.end - span.pages.start) * PAGE_SIZE)?;
        }
    }
    Ok(())
}
