//! Opening a snapshot.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, fstat, openat, statat};
use rustix::io::Errno;

use crate::container::{
    CONTAINER_FILE, Header, IMAGE_FILE, NO_PROFILE_VERSION, OVERLAY_FILE,
    PROFILE_VERSION_WITHOUT_LEAVES, Section, decode_zero_map,
};
use crate::digests::Digests;
use crate::error::OpenError;
use crate::extent::{Tail, check_dense};
use crate::manifest::{ImageKind, Manifest};
use crate::packed::{Packed, PackedError, PackedFile};
use crate::page_set::PageSet;
use crate::profile::Profile;
use crate::read_at::ReadAt;

/// How often opening starts anew because the snapshot was replaced meanwhile.
pub(crate) const MAX_ATTEMPTS: u32 = 64;

/// An open snapshot.
///
/// Its files were opened through one descriptor of the directory and are never written again, so it stays whole
/// and the same when the directory is replaced or removed. Shared references may be used by many threads.
#[derive(Debug)]
pub struct Snapshot {
    path: PathBuf,
    manifest: Manifest,
    machine_state_version: u32,
    machine_state: Vec<u8>,
    header: Header,
    container: Arc<dyn ReadAt>,
    container_path: PathBuf,
    /// The directory, where it lies in one.
    dir: Option<OwnedFd>,
    /// Packed files that were asked for, by their kind.
    packed: [OnceLock<Option<Packed>>; PackedFile::ALL.len()],
    zero_map: PageSet,
    image: Content,
    overlay: Option<Content>,
    digests: Arc<Digests>,
}

/// Bytes of a snapshot, opened read-only: its image, or its writable disk's content.
#[derive(Debug, Clone)]
pub enum Content {
    /// A file of the snapshot's directory.
    File(Arc<File>),
    /// A part of a pool's extent.
    Extent(Arc<dyn ReadAt>),
}

impl ReadAt for Content {
    fn size(&self) -> io::Result<u64> {
        match self {
            Self::File(file) => ReadAt::size(file),
            Self::Extent(extent) => extent.size(),
        }
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::File(file) => ReadAt::read_exact_at(file, buf, offset),
            Self::Extent(extent) => extent.read_exact_at(buf, offset),
        }
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        match self {
            Self::File(file) => ReadAt::next_data(file, offset),
            Self::Extent(extent) => extent.next_data(offset),
        }
    }
}

impl Snapshot {
    /// Opens the snapshot in directory `path`.
    ///
    /// Header, manifest, machine state and zero map are read, their CRCs checked before they are decoded. The image
    /// and the overlay are opened, and their lengths checked; their bytes are not read.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong; each kind of damage has its own variant.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        let path = path.as_ref();
        for _ in 0..MAX_ATTEMPTS {
            let dir = open_dir(path)?;
            match Self::open_in(&dir, path) {
                Err(_) if was_replaced(&dir, path) => {}
                result => return result,
            }
        }
        Err(OpenError::Replaced { path: path.into(), attempts: MAX_ATTEMPTS })
    }

    /// Opens a snapshot in a directory that is open already, as [`open_directory`] opens it. `path` is its path: where another
    /// snapshot takes the place of this one meanwhile, that one is opened.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong.
    pub fn open_at(directory: &OwnedFd, path: impl AsRef<Path>) -> Result<Self, OpenError> {
        let path = path.as_ref();
        match Self::open_in(directory, path) {
            Err(_) if was_replaced(directory, path) => Self::open(path),
            result => result,
        }
    }

    fn open_in(dir: &OwnedFd, path: &Path) -> Result<Self, OpenError> {
        let container_path = path.join(CONTAINER_FILE);
        let container = open_container(dir, path)?;
        let read = Read::container(&container, &container_path)?;
        let image = open_with_len(dir, path, IMAGE_FILE, read.manifest.layout.total_bytes())?;
        let overlay = match read.manifest.overlay {
            Some(identity) => {
                let file = open_with_len(dir, path, OVERLAY_FILE, identity.len)?;
                Some(Content::File(Arc::new(file)))
            }
            None => None,
        };
        let dir = dir.try_clone().map_err(|source| OpenError::Io {
            path: path.into(),
            action: "keep open",
            source,
        })?;
        let image = Content::File(Arc::new(image));
        let mut snapshot = read.into_snapshot(path, container, container_path, image, overlay);
        snapshot.dir = Some(dir);
        Ok(snapshot)
    }

    /// Opens the snapshot that the extent of a pool holds, as [`write_extent`](crate::write_extent)
    /// wrote it: `image` is the extent's guest memory, `tail` its tail, and `name` the snapshot's
    /// name in errors.
    ///
    /// It reads and checks the same as [`Snapshot::open`]. The caller keeps the extent pinned.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong.
    pub fn open_extent(
        name: impl AsRef<Path>,
        image: Arc<dyn ReadAt>,
        tail: &Arc<dyn ReadAt>,
    ) -> Result<Self, OpenError> {
        let path = name.as_ref();
        let tail = Tail::open(tail, path)?;
        let read = Read::container(&tail.container, path)?;
        check_dense(&read.manifest, path)?;
        let overlay = match read.manifest.overlay {
            Some(identity) => Some(Content::Extent(Arc::new(tail.overlay(identity.len, path)?))),
            None => None,
        };
        let (container, image) = (tail.container, Content::Extent(image));
        Ok(read.into_snapshot(path, container, path.to_owned(), image, overlay))
    }

    /// The path that the snapshot was opened by. Another snapshot may have taken its place since.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The machine state's version and its bytes, CRC checked. The caller compares the version with those it reads.
    #[must_use]
    pub fn machine_state(&self) -> (u32, &[u8]) {
        (self.machine_state_version, &self.machine_state)
    }

    /// What earlier runs touched, if any was recorded. It is read when it is asked for.
    ///
    /// # Errors
    /// [`OpenError`] when the section is damaged, does not decode, or is not a profile of this snapshot.
    pub fn profile(&self) -> Result<Option<Profile>, OpenError> {
        let path = &self.container_path;
        let version = self.header.entry(Section::Profile).version;
        if version == NO_PROFILE_VERSION {
            return Ok(None);
        }
        let mut bytes = self.header.read_section(&*self.container, path, Section::Profile)?;
        if version == PROFILE_VERSION_WITHOUT_LEAVES {
            bytes.push(ABSENT);
        }
        decode_profile(&bytes, &self.manifest, path).map(Some)
    }

    /// The [profile](Self::profile), or an empty one of this snapshot to put into it what was learnt.
    ///
    /// # Errors
    /// As [`profile`](Self::profile).
    pub fn profile_or_empty(&self) -> Result<Profile, OpenError> {
        Ok(self.profile()?.unwrap_or_else(|| Profile::of(self.manifest.description.id)))
    }

    /// A file that was packed from the image beside it; `None` where there is none, as in a pool. It is opened, and its
    /// header and table checked, when it is first asked for.
    ///
    /// # Errors
    /// [`PackedError`] when it is damaged, or not of this snapshot.
    pub fn packed(&self, kind: PackedFile) -> Result<Option<&Packed>, PackedError> {
        let slot = &self.packed[kind.index()];
        if let Some(packed) = slot.get() {
            return Ok(packed.as_ref());
        }
        let packed = self.open_packed(kind)?;
        Ok(slot.get_or_init(|| packed).as_ref())
    }

    /// The packed file, if it was asked for before, and there is one.
    #[must_use]
    pub fn opened_packed(&self, kind: PackedFile) -> Option<&Packed> {
        self.packed[kind.index()].get()?.as_ref()
    }

    fn open_packed(&self, kind: PackedFile) -> Result<Option<Packed>, PackedError> {
        let Some(dir) = &self.dir else { return Ok(None) };
        let file = match open_file(dir, &self.path, kind.name()) {
            Err(OpenError::MissingFile { .. }) => return Ok(None),
            result => result?,
        };
        let (id, pages) = (self.manifest.description.id, self.manifest.layout.pages());
        Packed::read(file, self.path.join(kind.name()), kind, id, pages).map(Some)
    }

    /// The zero pages of the image, by image page.
    #[must_use]
    pub fn zero_map(&self) -> &PageSet {
        &self.zero_map
    }

    /// The image: all of guest memory, region after region.
    #[must_use]
    pub fn image(&self) -> &Content {
        &self.image
    }

    /// The image file, `memory.img`; `None` for a snapshot in a pool.
    #[must_use]
    pub fn image_file(&self) -> Option<&File> {
        match &self.image {
            Content::File(file) => Some(file),
            Content::Extent(_) => None,
        }
    }

    /// The writable disk's content at the freeze.
    #[must_use]
    pub fn overlay(&self) -> Option<&Content> {
        self.overlay.as_ref()
    }

    /// The digests of the image's pages. They are read when they are asked for.
    #[must_use]
    pub fn digests(&self) -> &Arc<Digests> {
        &self.digests
    }
}

/// What is read of the container at every start.
struct Read {
    header: Header,
    manifest: Manifest,
    machine_state: Vec<u8>,
    zero_map: PageSet,
}

impl Read {
    fn container(container: &dyn ReadAt, path: &Path) -> Result<Self, OpenError> {
        let header = Header::read(container, path)?;
        let section = |section| header.read_section(container, path, section);
        let manifest = decode_manifest(&section(Section::Manifest)?, path)?;
        let zero_map = section(Section::ZeroMap)?;
        let zero_map = decode_zero_map(&zero_map, manifest.layout.pages(), path)?;
        check_consistent(&header, &manifest, &zero_map, path)?;
        let machine_state = section(Section::MachineState)?;
        Ok(Self { header, manifest, machine_state, zero_map })
    }

    fn into_snapshot(
        self,
        path: &Path,
        container: impl ReadAt + 'static,
        container_path: PathBuf,
        image: Content,
        overlay: Option<Content>,
    ) -> Snapshot {
        let Self { header, manifest, machine_state, zero_map } = self;
        let digests_start = header.range(Section::Digests).start;
        let container: Arc<dyn ReadAt> = Arc::new(container);
        let pages = manifest.layout.pages();
        let digests = Digests::new(container.clone(), container_path.clone(), digests_start, pages);
        let digests = Arc::new(digests);
        Snapshot {
            path: path.into(),
            machine_state_version: header.entry(Section::MachineState).version,
            manifest,
            machine_state,
            header,
            container,
            container_path,
            dir: None,
            packed: Default::default(),
            zero_map,
            image,
            overlay,
            digests,
        }
    }
}

/// Opens the directory of a snapshot, for [`Snapshot::open_at`].
///
/// # Errors
/// There is no directory at the path, or it cannot be opened.
pub fn open_directory(path: &Path) -> Result<OwnedFd, OpenError> {
    open_dir(path)
}

/// Opens the directory of a snapshot.
pub(crate) fn open_dir(path: &Path) -> Result<OwnedFd, OpenError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT => OpenError::NotFound { path: path.into() },
        Errno::NOTDIR => {
            OpenError::NotASnapshot { path: path.into(), reason: "it is not a directory" }
        }
        errno => OpenError::Io { path: path.into(), action: "open", source: errno.into() },
    })
}

/// Whether `path` no longer names the directory `dir`.
pub(crate) fn was_replaced(dir: &OwnedFd, path: &Path) -> bool {
    match (fstat(dir), statat(CWD, path, AtFlags::empty())) {
        (Ok(opened), Ok(named)) => (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino),
        (Ok(_), Err(Errno::NOENT)) => true,
        _ => false,
    }
}

/// Opens `snapshot.firn`; a directory without it is no snapshot, unless it holds the other files of one.
pub(crate) fn open_container(dir: &OwnedFd, path: &Path) -> Result<File, OpenError> {
    open_file(dir, path, CONTAINER_FILE).map_err(|error| match error {
        OpenError::MissingFile { .. }
            if statat(dir, IMAGE_FILE, AtFlags::SYMLINK_NOFOLLOW).is_err() =>
        {
            OpenError::NotASnapshot { path: path.into(), reason: "it holds no snapshot.firn" }
        }
        error => error,
    })
}

/// Opens regular file `name` of the directory for reading, and checks its length.
pub(crate) fn open_with_len(
    dir: &OwnedFd,
    path: &Path,
    name: &str,
    expected: u64,
) -> Result<File, OpenError> {
    let file = open_file(dir, path, name)?;
    let path = path.join(name);
    let actual = file
        .metadata()
        .map_err(|source| OpenError::Io { path: path.clone(), action: "stat", source })?
        .len();
    if actual < expected {
        return Err(OpenError::Truncated { path, section: None, expected, actual });
    }
    if actual > expected {
        return Err(OpenError::TooLong { path, expected, actual });
    }
    Ok(file)
}

pub(crate) fn open_file(dir: &OwnedFd, path: &Path, name: &str) -> Result<File, OpenError> {
    // Without NONBLOCK, a FIFO of that name would block the open for ever.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = openat(dir.as_fd(), name, flags, Mode::empty()).map_err(|errno| {
        let path = path.join(name);
        match errno {
            Errno::NOENT => OpenError::MissingFile { path },
            Errno::LOOP | Errno::NXIO => OpenError::NotAFile { path },
            errno => OpenError::Io { path, action: "open", source: errno.into() },
        }
    })?;
    let file = File::from(fd);
    match file.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(file),
        Ok(_) => Err(OpenError::NotAFile { path: path.join(name) }),
        Err(source) => Err(OpenError::Io { path: path.join(name), action: "stat", source }),
    }
}

/// Decodes the manifest of a section whose CRC is right.
pub(crate) fn decode_manifest(bytes: &[u8], path: &Path) -> Result<Manifest, OpenError> {
    match postcard::take_from_bytes(bytes) {
        Ok((manifest, [])) => Ok(manifest),
        _ => Err(OpenError::Malformed {
            path: path.into(),
            section: Section::Manifest,
            reason: "it does not decode",
        }),
    }
}

/// A part that is not there, as postcard encodes it.
const ABSENT: u8 = 0;

/// Decodes a profile whose CRC is right, and checks that it is one of the manifest's snapshot.
pub(crate) fn decode_profile(
    bytes: &[u8],
    manifest: &Manifest,
    path: &Path,
) -> Result<Profile, OpenError> {
    let Ok((profile, [])) = postcard::take_from_bytes::<Profile>(bytes) else {
        let (section, reason) = (Section::Profile, "it does not decode");
        return Err(OpenError::Malformed { path: path.into(), section, reason });
    };
    profile
        .check(manifest.description.id, manifest.layout.pages())
        .map_err(|source| OpenError::Profile { path: path.into(), source })?;
    Ok(profile)
}

/// Checks that the sections speak of the same image.
pub(crate) fn check_consistent(
    header: &Header,
    manifest: &Manifest,
    zero_map: &PageSet,
    path: &Path,
) -> Result<(), OpenError> {
    let malformed =
        |section, reason| Err(OpenError::Malformed { path: path.into(), section, reason });
    let pages = manifest.layout.pages();
    let stored = match manifest.image.kind {
        ImageKind::Sparse => pages - zero_map.count(),
        ImageKind::Dense => pages,
    };
    if manifest.image.stored_pages != stored {
        return malformed(Section::Manifest, "its count of stored pages contradicts the zero map");
    }
    if header.entry(Section::Digests).len != crate::container::digests_len(pages) {
        return malformed(Section::Digests, "its length is not that of one digest for each page");
    }
    Ok(())
}
