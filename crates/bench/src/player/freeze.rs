//! From traces to the snapshot of a player that has not begun.

use std::path::{Path, PathBuf};

use firn_memory::{AnonymousError, GuestMemory};
use firn_player::format::{OWN, PROGRAM};
use firn_snapshot::FunctionInfo;
use firn_vmm::{
    Console, Destination, FreezeError, FreezeReport, FreezeRequest, HostConfig, Microvm,
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
    /// The microVM could not be made.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The snapshot could not be written.
    #[error(transparent)]
    Freeze(#[from] FreezeError),
}

/// Makes a player that repeats any of `inputs` and freezes it before its first instruction into the snapshot
/// `destination`; `dense` stores its zero pages in a directory too.
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
    Ok(microvm.freeze(FreezeRequest { destination, dense, function: Some(function) })?)
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
        fill(&view, inputs, options.seed).map_err(PlayerMemoryError::from)?;
    }
    let [digest, len] = own.arguments;
    let registers = UserRegisters {
        page_tables: own.page_tables,
        instruction: OWN + PROGRAM,
        stack: own.stack,
        arguments: [digest, len, 0, 0],
    };
    let microvm = Microvm::prepare(memory, &[registers], &host(kvm, Vec::new()))?;
    let function = FunctionInfo { name: inputs.names(), handler: super::HANDLER.to_owned() };
    Ok((microvm, function))
}

/// What a player's microVM uses of its host: KVM, and windows for its reports. It has no devices.
pub(super) fn host(kvm: &Path, windows: Vec<firn_vmm::MmioWindow>) -> HostConfig {
    HostConfig {
        kvm: kvm.to_owned(),
        vsock: PathBuf::new(),
        scratch: PathBuf::new(),
        console: Console::default(),
        generation: None,
        windows,
    }
}
