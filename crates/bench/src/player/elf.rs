//! The player for other monitors: an ELF kernel for the 64-bit Linux boot protocol
//! (`Documentation/arch/x86/boot.rst`) and for PVH
//! (<https://xenbits.xen.org/docs/unstable/misc/pvh.html>), which QEMU starts.
//!
//! It contains the player's own region and `boot.S`. The player fills the trace's memory itself.

use std::path::Path;

use firn_player::format::{OWN, PAGE, PROGRAM, boot};
use firn_vmm::TscError;
use thiserror::Error;

use super::inputs::PlayerInputs;
use super::memory::{OwnRegion, PlayerMemoryError, Surroundings};
use super::options::PlayerOptions;

/// `boot.S`, linked for [`boot::START`].
const BOOT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/boot.bin"));

/// Memory up to 1 MiB that other monitors use for tables, the generation id and the BIOS, or that
/// QEMU does not provide. The player neither fills nor checks it.
const MONITORS: std::ops::Range<u64> = 0x9_f000..0x10_0000;

const HEADER_LEN: u64 = 64;
const PROGRAM_HEADER_LEN: u64 = 56;
const PROGRAM_HEADERS: u64 = 3;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
/// Readable, writable, executable.
const ALL: u32 = 7;
/// `XEN_ELFNOTE_PHYS32_ENTRY`: the PVH entry.
const PVH_NOTE: u32 = 18;
/// End of the low region of guest memory, before a gap of 1 GiB.
const LOW_MEMORY_END: u64 = 3 << 30;
const GAP: u64 = 1 << 30;

/// A player as an ELF kernel.
#[derive(Clone, Debug)]
pub struct PlayerElf {
    /// The file.
    pub bytes: Vec<u8>,
    /// Bytes of guest memory that it needs for itself.
    pub memory: u64,
}

/// Why an ELF kernel cannot be built.
#[derive(Debug, Error)]
pub enum PlayerElfError {
    /// More than one trace: an ELF kernel has no register that selects one.
    #[error("an ELF kernel replays one trace, not {0}: build one for each trace")]
    Inputs(usize),
    /// The player's memory cannot be built from the trace.
    #[error(transparent)]
    Memory(#[from] PlayerMemoryError),
    /// The frequency of the time-stamp counter is unknown.
    #[error(transparent)]
    Tsc(#[from] TscError),
}

/// Builds a player that replays one trace under any monitor. It measures time with the time-stamp
/// counter, at the frequency that this host's KVM reports.
///
/// # Errors
/// See [`PlayerElfError`].
pub fn elf(
    inputs: &PlayerInputs,
    options: &PlayerOptions,
    kvm: &Path,
) -> Result<PlayerElf, PlayerElfError> {
    let number = inputs.iter().count();
    if number > 1 {
        return Err(PlayerElfError::Inputs(number));
    }
    let surroundings = Surroundings {
        unchecked: (MONITORS.start, MONITORS.end - MONITORS.start),
        boot: true,
        reports: 1,
        tsc_khz: u64::from(firn_vmm::tsc_khz(kvm)?),
    };
    let own = OwnRegion::new(inputs, options, surroundings)?;
    let end = own.start + own.len();
    let memory = if end > LOW_MEMORY_END { end - GAP } else { end };
    Ok(PlayerElf { bytes: write(&own), memory })
}

/// ELF header, program headers and note; then the boot code and the player's region, each from a
/// page boundary.
fn write(own: &OwnRegion) -> Vec<u8> {
    let region = own.bytes();
    let way = way_there(own, &region);
    let note = note();
    let (way_at, region_at) = (PAGE, PAGE + boot::LEN);
    let note_at = HEADER_LEN + PROGRAM_HEADERS * PROGRAM_HEADER_LEN;

    let mut file = Vec::new();
    // ELF, 64-bit, little-endian, version 1; then: an executable for x86-64.
    file.extend(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    file.extend([2_u16, 62].map(u16::to_le_bytes).concat());
    file.extend(1_u32.to_le_bytes());
    file.extend([boot::START + boot::ENTRY, HEADER_LEN, 0].map(u64::to_le_bytes).concat());
    file.extend(0_u32.to_le_bytes());
    // Lengths of this header and of a program header, and the number of program headers; no
    // sections.
    file.extend([64_u16, 56, 3, 64, 0, 0].map(u16::to_le_bytes).concat());
    for (type_, at, address, len) in [
        (PT_LOAD, way_at, boot::START, way.len() as u64),
        (PT_LOAD, region_at, own.start, region.len() as u64),
        (PT_NOTE, note_at, 0, note.len() as u64),
    ] {
        file.extend([type_, ALL].map(u32::to_le_bytes).concat());
        // Offset, virtual and physical address, length in file and memory, alignment.
        file.extend([at, address, address, len, len, 4].map(u64::to_le_bytes).concat());
    }
    file.extend(note);
    for (at, part) in [(way_at, way), (region_at, region)] {
        file.resize(usize::try_from(at).unwrap_or(usize::MAX), 0);
        file.extend(part);
    }
    file
}

/// The image of `boot.S` with its parameters.
fn way_there(own: &OwnRegion, region: &[u8]) -> Vec<u8> {
    let mut image = BOOT.to_vec();
    image.resize(index(boot::LEN), 0);
    let [digest, len] = own.arguments;
    let words = [own.page_tables, OWN + PROGRAM, own.stack, digest, len];
    let words = words.map(u64::to_le_bytes).concat();
    image[index(boot::WORDS)..][..words.len()].copy_from_slice(&words);
    let top = &region[index(own.page_tables - own.start)..][..index(PAGE)];
    image[index(boot::LOW_TABLE)..][..top.len()].copy_from_slice(top);
    image
}

fn note() -> Vec<u8> {
    let mut note = [4, 8, PVH_NOTE].map(u32::to_le_bytes).concat();
    note.extend(*b"Xen\0");
    note.extend((boot::START + boot::PVH_ENTRY).to_le_bytes());
    note
}

/// A constant as an index. It always fits on the 64-bit hosts of KVM.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}
