//! Formats the backing file of an emulated NVDIMM as the namespace of `/dev/dax0.0`, or of
//! `/dev/pmem1` for a DAX file system, without `ndctl`.
//!
//! The kernel recognises a namespace by a 4 KiB information block at offset 4096 (Linux
//! `drivers/nvdimm/pfn.h`, `struct nd_pfn_sb`; checksum: `nd_fletcher64` in
//! `drivers/nvdimm/core.c`).

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

/// The kind of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// A character device.
    Devdax,
    /// A block device whose pages have descriptors, as DAX file systems require.
    Fsdax,
}

impl Mode {
    fn signature(self) -> &'static [u8; 16] {
        match self {
            Self::Devdax => b"NVDIMM_DAX_INFO\0",
            Self::Fsdax => b"NVDIMM_PFN_INFO\0",
        }
    }
}

const BLOCK: usize = 4096;
const BLOCK_OFFSET: u64 = 4096;
const CHECKSUM: usize = BLOCK - 8;

/// Alignment of the device, of its data and of the file's size, in bytes.
pub(crate) const ALIGNMENT: u64 = 2 << 20;

/// Whether `file` has an intact information block of a devdax namespace.
pub(crate) fn is_formatted(file: &File) -> std::io::Result<bool> {
    let mut block = [0; BLOCK];
    match file.read_exact_at(&mut block, BLOCK_OFFSET) {
        Ok(()) => Ok(block.starts_with(Mode::Devdax.signature())
            && block[CHECKSUM..] == fletcher64(&block[..CHECKSUM]).to_le_bytes()),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Formats `file` as a namespace of `size` bytes. The first 2 MiB contain the block, the rest is
/// the device.
///
/// All blocks of the file are allocated at once. QEMU maps the file, and a full disk at the first
/// write to a page would end QEMU with SIGBUS.
pub(crate) fn format(file: &File, size: u64, uuid: [u8; 16], mode: Mode) -> std::io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, size) {
        // The file system has no fallocate.
        Err(Errno::OPNOTSUPP) => file.set_len(size)?,
        allocated => allocated?,
    }
    file.write_all_at(&info_block(size, uuid, mode), BLOCK_OFFSET)
}

fn info_block(size: u64, uuid: [u8; 16], mode: Mode) -> [u8; BLOCK] {
    const PARENT_UUID: [u8; 16] = [0; 16];
    const FLAGS: u32 = 0;
    const VERSION: [u16; 2] = [1, 4];
    // The pages' descriptors are in RAM, not on the device.
    const MODE_RAM: u32 = 1;
    const START_PAD: u32 = 0;
    const END_TRUNCATE: u32 = 0;
    const ALIGN: u32 = 2 << 20;
    const PAGE_SIZE: u32 = 4096;
    const PAGE_STRUCT_SIZE: u16 = 64;

    let pages = (size - ALIGNMENT) / u64::from(PAGE_SIZE);
    let mut fields = Vec::with_capacity(BLOCK);
    fields.extend(mode.signature());
    fields.extend(uuid);
    fields.extend(PARENT_UUID);
    fields.extend(FLAGS.to_le_bytes());
    fields.extend(VERSION.into_iter().flat_map(u16::to_le_bytes));
    fields.extend(ALIGNMENT.to_le_bytes());
    fields.extend(pages.to_le_bytes());
    for field in [MODE_RAM, START_PAD, END_TRUNCATE, ALIGN, PAGE_SIZE] {
        fields.extend(field.to_le_bytes());
    }
    fields.extend(PAGE_STRUCT_SIZE.to_le_bytes());

    let mut block = [0; BLOCK];
    block[..fields.len()].copy_from_slice(&fields);
    let checksum = fletcher64(&block[..CHECKSUM]);
    block[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
    block
}

/// The kernel's 64-bit Fletcher sum over the little-endian 32-bit words of the block. The last
/// field, the checksum, counts as zero.
fn fletcher64(bytes: &[u8]) -> u64 {
    let (mut low, mut high) = (0_u32, 0_u64);
    let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    for word in words.chain([0, 0]) {
        low = low.wrapping_add(word);
        high = high.wrapping_add(u64::from(low));
    }
    (high << 32) | u64::from(low)
}

#[cfg(test)]
#[path = "devdax_tests.rs"]
mod tests;
