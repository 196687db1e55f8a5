//! Tracepoints, as tracefs describes them.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use super::BpfError;

/// Where the kernel has added a page to the page cache.
pub(super) const ADD_PAGE: &str = "filemap:mm_filemap_add_to_page_cache";
/// Where the kernel passes a read or write to the driver of a block device.
const QUEUE: &str = "block:block_bio_queue";

/// What tracefs has of a tracepoint: its id, and the description of its record.
struct Event {
    name: &'static str,
    id: u64,
    format: String,
}

impl Event {
    /// Reads tracefs through a detached mount, which ends with its descriptor.
    fn find(name: &'static str) -> Result<Self, BpfError> {
        let failed = |source| BpfError::Tracepoint { name, source };
        let mounted = || -> rustix::io::Result<OwnedFd> {
            let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&context)?;
            let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        };
        let tracefs = mounted().map_err(|errno| failed(errno.into()))?;
        let read = |file: &str| -> io::Result<String> {
            let path = format!("events/{}/{file}", name.replace(':', "/"));
            let file = openat(&tracefs, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            io::read_to_string(File::from(file))
        };
        let id = read("id").map_err(failed)?;
        let id = id.trim().parse().map_err(|_| BpfError::Field { name, field: "id" })?;
        Ok(Self { name, id, format: read("format").map_err(failed)? })
    }

    /// The offset of a field of one of these sizes in the record.
    fn field(&self, field: &'static str, sizes: &[&str]) -> Result<i16, BpfError> {
        let mut lines = self.format.lines().filter_map(|line| {
            let (declaration, rest) = line.trim().strip_prefix("field:")?.split_once(';')?;
            let mut rest = rest.split(';').filter_map(|part| part.trim().split_once(':'));
            let is = declaration.rsplit(' ').next()?.split('[').next() == Some(field);
            let offset = rest.next().filter(|_| is)?.1.parse::<i16>().ok()?;
            sizes.contains(&rest.next()?.1).then_some(offset)
        });
        lines.next().ok_or(BpfError::Field { name: self.name, field })
    }
}

/// The id of [`ADD_PAGE`], and the offsets of the fields in its record.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tracepoint {
    pub(super) id: u64,
    pub(super) inode: i16,
    pub(super) index: i16,
    pub(super) device: i16,
    /// `None` on kernels without large folios.
    pub(super) order: Option<i16>,
}

impl Tracepoint {
    pub(super) fn find() -> Result<Self, BpfError> {
        Self::of(&Event::find(ADD_PAGE)?)
    }

    fn of(event: &Event) -> Result<Self, BpfError> {
        Ok(Self {
            id: event.id,
            inode: event.field("i_ino", &["8"])?,
            index: event.field("index", &["8"])?,
            device: event.field("s_dev", &["4"])?,
            order: event.field("order", &["1"]).ok(),
        })
    }

    #[cfg(test)]
    pub(super) fn parse(format: &str) -> Result<Self, BpfError> {
        Self::of(&Event { name: ADD_PAGE, id: 0, format: format.to_owned() })
    }
}

/// The id of `block:block_bio_queue`, and the offsets of the fields in its record.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Queued {
    pub(super) id: u64,
    pub(super) device: i16,
    /// The operation as letters, of which the first is `R` for a read.
    pub(super) operation: i16,
    /// The length in sectors of 512 bytes.
    pub(super) sectors: i16,
}

impl Queued {
    pub(super) fn find() -> Result<Self, BpfError> {
        let event = Event::find(QUEUE)?;
        Ok(Self {
            id: event.id,
            device: event.field("dev", &["4"])?,
            operation: event.field("rwbs", &["8", "10"])?,
            sectors: event.field("nr_sector", &["4"])?,
        })
    }
}
