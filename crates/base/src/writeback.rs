//! Starting to write dirty pages of files.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Starts writing the dirty pages of a part of a file to storage, and does not wait for it: a later
/// sync finds fewer dirty pages. It makes nothing durable, and errors are left to that sync.
pub fn begin_writeback(file: &File, range: Range<u64>) {
    let (Ok(offset), Ok(len)) =
        (i64::try_from(range.start), i64::try_from(range.end.saturating_sub(range.start)))
    else {
        return;
    };
    // The kernel takes a length of 0 for the rest of the file.
    if len > 0 {
        let flags = libc::SYNC_FILE_RANGE_WRITE;
        // SAFETY: the call takes no pointers, and the descriptor is open while `file` lives.
        let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, flags) };
    }
}
