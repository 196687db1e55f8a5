//! fs-verity: the kernel checks every block of a file when it reads it
//! (Documentation/filesystems/fsverity.rst).

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, ioctl_getflags, statx};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, Updater, ioctl, opcode};

/// The fs-verity digest of a file: SHA-256 of a descriptor with the file's length and the root of
/// the Merkle tree over its blocks of 4096 bytes, without a salt. It depends on the content alone.
pub type Digest = [u8; 32];

/// `FS_VERITY_HASH_ALG_SHA256`.
const SHA256: u16 = 1;
const BLOCK_SIZE: u32 = 4096;

/// `FS_DAX_FL` (linux/fs.h).
const DAX_FLAG: u32 = 0x0200_0000;

/// `struct fsverity_enable_arg`.
#[repr(C)]
#[derive(Default)]
struct EnableArg {
    version: u32,
    hash_algorithm: u32,
    block_size: u32,
    salt_size: u32,
    salt_ptr: u64,
    sig_size: u32,
    reserved1: u32,
    sig_ptr: u64,
    reserved2: [u64; 11],
}

/// `struct fsverity_digest`, with room for SHA-256.
#[repr(C)]
#[derive(Default)]
struct DigestArg {
    algorithm: u16,
    size: u16,
    digest: Digest,
}

const ENABLE: Opcode = opcode::write::<EnableArg>(b'f', 133);
// The kernel's opcode has the size of the struct without the digest's bytes.
const MEASURE: Opcode = opcode::read_write::<[u16; 2]>(b'f', 134);

/// Protects a file with fs-verity for the rest of its life and returns its digest; `None` where the
/// kernel or the file system does not support that, as on DAX.
///
/// The file is read once, and can never be written again. It must be open for reading, and not for
/// writing by any process.
///
/// # Errors
/// The error of the system call, also where the file system has no room for the Merkle tree (1/127
/// of the file).
pub fn protect(file: &File) -> io::Result<Option<Digest>> {
    let arg = EnableArg {
        version: 1,
        hash_algorithm: SHA256.into(),
        block_size: BLOCK_SIZE,
        ..EnableArg::default()
    };
    // SAFETY: the opcode takes this struct, whose pointers are empty, and only reads it.
    let enable = unsafe { Setter::<ENABLE, EnableArg>::new(arg) };
    // SAFETY: as above.
    let enabled = unsafe { ioctl(file, enable) };
    match enabled {
        Ok(()) | Err(Errno::EXIST) => measure(file),
        Err(errno) if is_unsupported(errno) => Ok(None),
        Err(Errno::INVAL) if !fits(file)? => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// The digest of a file that fs-verity [protects](protect); `None` of any other file.
///
/// # Errors
/// The error of the system call.
pub fn measure(file: &File) -> io::Result<Option<Digest>> {
    let mut arg = DigestArg { size: 32, ..DigestArg::default() };
    // SAFETY: the opcode takes this struct, and writes at most `size` bytes behind its two fields.
    let measure = unsafe { Updater::<MEASURE, DigestArg>::new(&mut arg) };
    // SAFETY: as above.
    let measured = unsafe { ioctl(file, measure) };
    match measured {
        Ok(()) => Ok((arg.algorithm == SHA256 && arg.size == 32).then_some(arg.digest)),
        // Another algorithm, with a longer digest.
        Err(Errno::NODATA | Errno::OVERFLOW) => Ok(None),
        Err(errno) if is_unsupported(errno) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether an error means that the kernel or the file system does not support fs-verity.
fn is_unsupported(errno: Errno) -> bool {
    matches!(errno, Errno::NOTTY | Errno::OPNOTSUPP)
}

/// Whether a file can have a tree of blocks of [`BLOCK_SIZE`]. For a file that cannot, `EINVAL` is
/// not an error of the caller: the blocks of its file system are smaller, or DAX maps it
/// (`ext4_begin_enable_verity`), now or with other mount options.
fn fits(file: &File) -> io::Result<bool> {
    let blocks = file.metadata()?.blksize() >= BLOCK_SIZE.into();
    let attributes = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::empty())?.stx_attributes;
    let flagged = ioctl_getflags(file).is_ok_and(|flags| flags.bits() & DAX_FLAG != 0);
    Ok(blocks && !attributes.contains(StatxAttributes::DAX) && !flagged)
}

#[cfg(test)]
#[path = "fs_verity_tests.rs"]
mod tests;
