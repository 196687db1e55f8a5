//! A loader whose reads are blocked, as by storage that does not respond.

use std::ffi::CString;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes of a `struct fanotify_event_metadata`.
const EVENT: usize = 24;

/// Blocks the reads of a file by threads named `loader` until it is dropped (permission events,
/// fanotify(7)). Other reads pass, page faults included.
#[derive(Debug)]
pub struct BlockedLoader {
    over: Arc<AtomicBool>,
    holds: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BlockedLoader {
    /// Blocks the loaders of a file.
    #[track_caller]
    pub fn of(file: &Path) -> Self {
        let flags =
            libc::FAN_CLASS_CONTENT | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK | libc::FAN_REPORT_TID;
        // SAFETY: the call has no pointers.
        let group = unsafe { libc::fanotify_init(flags, libc::O_RDONLY.cast_unsigned()) };
        assert!(group >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new and has no other owner.
        let group = File::from(unsafe { OwnedFd::from_raw_fd(group) });
        let path = CString::new(file.as_os_str().as_bytes()).unwrap();
        let (descriptor, mask) = (group.as_raw_fd(), libc::FAN_ACCESS_PERM);
        // SAFETY: the path is a C string that outlives the call.
        let marked = unsafe {
            libc::fanotify_mark(descriptor, libc::FAN_MARK_ADD, mask, libc::AT_FDCWD, path.as_ptr())
        };
        assert_eq!(marked, 0, "{}", std::io::Error::last_os_error());
        let (over, holds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let shared = (over.clone(), holds.clone());
        let thread = std::thread::spawn(move || answer(group, &shared.0, &shared.1));
        Self { over, holds, thread: Some(thread) }
    }

    /// Whether a loader is blocked.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.holds.load(Ordering::SeqCst)
    }
}

impl Drop for BlockedLoader {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Allows all reads except those of loaders until `over` is set. Closing the group allows the
/// blocked reads.
fn answer(mut group: File, over: &AtomicBool, holds: &AtomicBool) {
    let mut held = Vec::new();
    let mut events = [0; 64 * EVENT];
    while !over.load(Ordering::SeqCst) {
        let len = match group.read(&mut events) {
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        for event in events[..len].as_chunks::<EVENT>().0 {
            let word = |at: usize| i32::from_ne_bytes([0, 1, 2, 3].map(|byte| event[at + byte]));
            let (descriptor, thread) = (word(16), word(20));
            assert!(descriptor >= 0, "the queue of events is full");
            // SAFETY: the kernel made the descriptor for this event, and it has no other owner.
            let file = unsafe { OwnedFd::from_raw_fd(descriptor) };
            let name = std::fs::read_to_string(format!("/proc/{thread}/comm")).unwrap_or_default();
            if name.trim_end() == "loader" {
                held.push(file);
                holds.store(true, Ordering::SeqCst);
                continue;
            }
            let response = [descriptor.to_ne_bytes(), libc::FAN_ALLOW.to_ne_bytes()].concat();
            group.write_all(&response).unwrap();
        }
    }
}
