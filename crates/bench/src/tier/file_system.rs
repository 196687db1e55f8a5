//! The identity of a file system: whether a directory is still on the one that it was on.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{fstatvfs, major, minor};
use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, ioctl, opcode};
use uuid::Uuid;

/// `struct fsuuid2` of linux/fs.h.
#[repr(C)]
struct FsUuid {
    len: u8,
    uuid: [u8; 16],
}

/// `FS_IOC_GETFSUUID`, since Linux 6.9.
const GET_UUID: Opcode = opcode::read::<FsUuid>(0x15, 0);

/// The UUID of a file system, as `blkid` prints it. Where there is none, or an old kernel does not
/// report it, its `f_fsid` (statvfs(3)), which some file systems derive from their device; where
/// that is 0, the number of its device.
pub(super) fn identity(directory: &File) -> io::Result<String> {
    // SAFETY: the kernel writes a value of this type, for which all bytes are valid.
    let operation = unsafe { Getter::<GET_UUID, FsUuid>::new() };
    // SAFETY: the operation reads a property of the file system and changes nothing.
    match unsafe { ioctl(directory, operation) } {
        Ok(FsUuid { len: 16, uuid }) if uuid != [0; 16] => {
            return Ok(Uuid::from_bytes(uuid).to_string());
        }
        Ok(_) | Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::INVAL) => {}
        Err(errno) => return Err(errno.into()),
    }
    let id = fstatvfs(directory)?.f_fsid;
    if id != 0 {
        return Ok(format!("fsid {id:016x}"));
    }
    let device = directory.metadata()?.dev();
    Ok(format!("device {}:{}", major(device), minor(device)))
}
