//! The tracepoint `filemap:mm_filemap_add_to_page_cache`, as tracefs describes it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use super::BpfError;

const TRACEPOINT: &str = "events/filemap/mm_filemap_add_to_page_cache";

/// The tracepoint's id, and the offsets of the fields in its record.
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
    /// Reads tracefs through a detached mount, which ends with its descriptor.
    pub(super) fn find() -> Result<Self, BpfError> {
        let mounted = || -> rustix::io::Result<OwnedFd> {
            let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&context)?;
            let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        };
        let tracefs = mounted().map_err(|errno| BpfError::Tracepoint(errno.into()))?;
        let read = |name: &str| -> io::Result<String> {
            let path = format!("{TRACEPOINT}/{name}");
            let file = openat(&tracefs, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            io::read_to_string(File::from(file))
        };
        let id = read("id").map_err(BpfError::Tracepoint)?;
        let id = id.trim().parse().map_err(|_| BpfError::Field("id"))?;
        let format = read("format").map_err(BpfError::Tracepoint)?;
        Ok(Self { id, ..Self::parse(&format)? })
    }

    pub(super) fn parse(format: &str) -> Result<Self, BpfError> {
        let field = |name: &'static str, size: &str| {
            let mut lines = format.lines().filter_map(|line| {
                let (declaration, rest) = line.trim().strip_prefix("field:")?.split_once(';')?;
                let mut rest = rest.split(';').filter_map(|part| part.trim().split_once(':'));
                let is = declaration.rsplit(' ').next() == Some(name);
                let offset = rest.next().filter(|_| is)?.1.parse::<i16>().ok()?;
                (rest.next()?.1 == size).then_some(offset)
            });
            lines.next().ok_or(BpfError::Field(name))
        };
        Ok(Self {
            id: 0,
            inode: field("i_ino", "8")?,
            index: field("index", "8")?,
            device: field("s_dev", "4")?,
            order: field("order", "1").ok(),
        })
    }
}
