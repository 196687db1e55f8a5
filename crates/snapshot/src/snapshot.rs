//! Opening a snapshot.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use firn_base::get_or_try_init;

use crate::container::Header;
use crate::decode::{EMPTY, check_consistent, decode_manifest, decode_profile, decode_zero_map};
use crate::digests::Digests;
use crate::directory::check_len;
use crate::error::OpenError;
use crate::files::{CONTAINER_FILE, IMAGE_FILE, OVERLAY_FILE, PackedFile};
use crate::keys::Verifier;
use crate::manifest::Manifest;
use crate::open_files::{OpenTwice, SnapshotFiles};
use crate::packed::{Packed, PackedError};
use crate::page_set::PageSet;
use crate::profile::Profile;
use crate::protect::check_protection;
use crate::read_at::ReadAt;
use crate::section::{NO_PROFILE_VERSION, PROFILE_VERSION_WITHOUT_LEAVES, Section};
use crate::signature::{Opened, Signed, open_checked, open_checked_tail};
use crate::tail::{Tail, check_dense};

/// An open snapshot.
///
/// It is immutable: its files are of one directory and are never written again, so it stays valid
/// when the directory is replaced or removed. What a pool grants
/// for one run of it is a [`Grant`](crate::Grant). Several threads may use one value.
#[derive(Debug)]
pub struct Snapshot {
    path: PathBuf,
    manifest: Manifest,
    machine_state_version: u32,
    machine_state: Vec<u8>,
    header: Header,
    container: Arc<dyn ReadAt>,
    container_path: PathBuf,
    /// What its signature confirms, if it was checked.
    signed: Option<Signed>,
    /// The image file a second time, if the snapshot is in a directory.
    image_again: Option<File>,
    /// The packed files of its directory, by kind.
    packed_files: [Option<OpenTwice>; PackedFile::ALL.len()],
    /// Those that were requested, by kind.
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
    /// It reads header, manifest, machine state and zero map, and checks their CRCs before it
    /// decodes them. It opens the image and the overlay and checks their lengths, but does not read
    /// them.
    ///
    /// # Errors
    /// [`OpenError`]; each kind of damage has its own variant.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        Self::open_signed(path, None)
    }

    /// The same. If there is a verifier, it has to confirm `snapshot.firn`, except for the digests,
    /// before any byte of it is parsed. Image and writable disk are not read: see
    /// [`check_signed_files`](Self::check_signed_files).
    ///
    /// # Errors
    /// See [`Snapshot::open`].
    pub fn open_signed(
        path: impl AsRef<Path>,
        verifier: Option<&Verifier>,
    ) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let (files, _) = SnapshotFiles::open(path)?;
        Self::of_files(files, path, verifier)
    }

    /// The snapshot in open files. It reads and checks the same as
    /// [`open_signed`](Self::open_signed), and opens nothing. `path` is the snapshot's path, for
    /// messages.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn of_files(
        files: SnapshotFiles,
        path: impl AsRef<Path>,
        verifier: Option<&Verifier>,
    ) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let SnapshotFiles { container, signature, image, overlay, packed } = files;
        let container_path = path.join(CONTAINER_FILE);
        let Opened { container, header, statement } =
            open_checked(container, signature.as_ref(), path, verifier)?;
        let read = Read::container(header, &container, &container_path)?;
        let check = |file: &File, name, len| {
            let path = path.join(name);
            check_len(file, &path, len)?;
            check_protection(file, &path, read.manifest.protection(name))
        };
        let missing = |name| move || OpenError::MissingFile { path: path.join(name) };
        let image = image.ok_or_else(missing(IMAGE_FILE))?;
        check(&image.file, IMAGE_FILE, read.manifest.layout.total_bytes())?;
        let overlay = match read.manifest.overlay {
            Some(identity) => {
                let file = overlay.ok_or_else(missing(OVERLAY_FILE))?;
                check(&file, OVERLAY_FILE, identity.len)?;
                Some(Content::File(Arc::new(file)))
            }
            None => None,
        };
        let content = Content::File(Arc::new(image.file));
        let snapshot = read.into_snapshot(path, container, container_path, content, overlay);
        let (signed, image_again) = (statement.map(Signed::Files), Some(image.again));
        Ok(Self { signed, image_again, packed_files: packed, ..snapshot })
    }

    /// The snapshot of two files that lie in no directory of a snapshot: `container` has the
    /// content of `snapshot.firn`, the other one the image. There is no writable disk. Without an
    /// image file the image cannot be read: another process provides guest memory. It reads and
    /// checks the same as [`of_files`](Self::of_files). The paths are for messages.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn of_two_files(
        container: File,
        container_path: &Path,
        image: Option<(OpenTwice, &Path)>,
    ) -> Result<Self, OpenError> {
        let container: Arc<dyn ReadAt> = Arc::new(container);
        let header = Header::read(&*container, container_path)?;
        let read = Read::container(header, &container, container_path)?;
        let len = read.manifest.layout.total_bytes();
        if read.manifest.overlay.is_some() {
            let path = container_path.with_file_name(OVERLAY_FILE);
            return Err(OpenError::MissingFile { path });
        }
        let (content, image_again) = match image {
            Some((image, path)) => {
                check_len(&image.file, path, len)?;
                (Content::File(Arc::new(image.file)), Some(image.again))
            }
            None => (Content::Extent(Arc::new(Elsewhere { len })), None),
        };
        let path = container_path.to_owned();
        let snapshot = read.into_snapshot(container_path, container, path, content, None);
        Ok(Self { image_again, ..snapshot })
    }

    /// Opens the snapshot that the extent of a pool holds, as a [freeze](crate::freeze()) wrote it:
    /// `image` is the extent's guest memory, `tail` its tail, and `name` the snapshot's name in
    /// errors.
    ///
    /// It reads and checks the same as [`Snapshot::open_signed`]: if there is a verifier, it has to
    /// confirm the tail, except for digests and disk, before any byte of it is parsed. The caller
    /// keeps the extent pinned.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_extent(
        name: impl AsRef<Path>,
        image: Arc<dyn ReadAt>,
        tail: &Arc<dyn ReadAt>,
        verifier: Option<&Verifier>,
    ) -> Result<Self, OpenError> {
        let path = name.as_ref();
        let (tail, statement) = match verifier {
            None => (tail.clone(), None),
            Some(verifier) => {
                let (tail, statement) = open_checked_tail(tail, path, verifier)?;
                (tail, Some(statement))
            }
        };
        let tail = Tail::open(&tail, path)?;
        let header = Header::read(&tail.container, path)?;
        let signed = statement
            .map(|statement| statement.of_extent(tail.digests(&header), tail.disk(), path))
            .transpose()?;
        let read = Read::container(header, &tail.container, path)?;
        check_dense(&read.manifest, path)?;
        let overlay = match read.manifest.overlay {
            Some(identity) => Some(Content::Extent(Arc::new(tail.overlay(identity.len, path)?))),
            None => None,
        };
        let (container, image) = (Arc::new(tail.container), Content::Extent(image));
        let snapshot = read.into_snapshot(path, container, path.to_owned(), image, overlay);
        Ok(Self { signed, ..snapshot })
    }

    /// Reads image and writable disk, and checks that they are what was signed. Without a verifier
    /// at the opening there is nothing to check.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn check_signed_files(&self) -> Result<(), OpenError> {
        let Some(signed) = &self.signed else { return Ok(()) };
        let overlay = self.overlay.as_ref().map(|overlay| overlay as &dyn ReadAt);
        signed.check(&self.image, overlay, &self.path)
    }

    /// The path that the snapshot was opened at. The path may name another snapshot by now.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The version of the machine state and its bytes, whose CRC was checked. The caller checks the
    /// version.
    #[must_use]
    pub fn machine_state(&self) -> (u32, &[u8]) {
        (self.machine_state_version, &self.machine_state)
    }

    /// Reads the profile of earlier runs; `None` if none was recorded.
    ///
    /// # Errors
    /// [`OpenError`] when the section is damaged, does not decode, or is not a profile of this
    /// snapshot.
    pub fn profile(&self) -> Result<Option<Profile>, OpenError> {
        let path = &self.container_path;
        let version = self.header.entry(Section::Profile).version;
        if version == NO_PROFILE_VERSION {
            return Ok(None);
        }
        let mut bytes = self.header.read_section(&*self.container, path, Section::Profile)?;
        if version == PROFILE_VERSION_WITHOUT_LEAVES {
            bytes.push(EMPTY);
        }
        decode_profile(&bytes, &self.manifest, path).map(Some)
    }

    /// The [profile](Self::profile), or an empty profile of this snapshot.
    ///
    /// # Errors
    /// As [`profile`](Self::profile).
    pub fn profile_or_empty(&self) -> Result<Profile, OpenError> {
        Ok(self.profile()?.unwrap_or_else(|| Profile::of(self.manifest.description.id)))
    }

    /// A file that was packed from the image; `None` if there is none, as in a pool. The first call
    /// checks its header and table.
    ///
    /// # Errors
    /// [`PackedError`] when it is damaged, or not of this snapshot.
    pub fn packed(&self, kind: PackedFile) -> Result<Option<&Packed>, PackedError> {
        let slot = &self.packed[kind.index()];
        Ok(get_or_try_init(slot, || self.open_packed(kind))?.as_ref())
    }

    /// The packed file, if [`packed`](Self::packed) returned it before.
    #[must_use]
    pub fn opened_packed(&self, kind: PackedFile) -> Option<&Packed> {
        self.packed[kind.index()].get()?.as_ref()
    }

    fn open_packed(&self, kind: PackedFile) -> Result<Option<Packed>, PackedError> {
        let Some(OpenTwice { file, again }) = &self.packed_files[kind.index()] else {
            return Ok(None);
        };
        let path = self.path.join(kind.name());
        let digest = self.manifest.protection(kind.name());
        check_protection(file, &path, digest)?;
        let read = |source| PackedError::Read { path: path.clone(), source };
        let file = file.try_clone().map_err(read)?;
        let (id, pages) = (self.manifest.description.id, self.manifest.layout.pages());
        let packed = Packed::read(file, path.clone(), kind, id, pages)?;
        let packed = packed.with_again(again).map_err(read)?;
        Ok(Some(packed.with_protection(digest.is_some())))
    }

    /// A packed file with an open file description of its own, for what loads it.
    #[must_use]
    pub fn packed_again(&self, kind: PackedFile) -> Option<&File> {
        Some(&self.packed_files[kind.index()].as_ref()?.again)
    }

    /// Whether fs-verity protects the image file: its digest is the manifest's.
    #[must_use]
    pub fn image_is_protected(&self) -> bool {
        self.image_file().is_some() && self.manifest.protection(IMAGE_FILE).is_some()
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

    /// The image file with an open file description of its own, for what loads it.
    #[must_use]
    pub fn image_again(&self) -> Option<&File> {
        self.image_again.as_ref()
    }

    /// The writable disk's content at the freeze.
    #[must_use]
    pub fn overlay(&self) -> Option<&Content> {
        self.overlay.as_ref()
    }

    /// The digests of the image's pages. They are read on demand.
    #[must_use]
    pub fn digests(&self) -> &Arc<Digests> {
        &self.digests
    }
}

/// An image that another process has.
#[derive(Debug)]
struct Elsewhere {
    len: u64,
}

impl ReadAt for Elsewhere {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn read_exact_at(&self, _: &mut [u8], _: u64) -> io::Result<()> {
        let reason = "another process provides the guest memory of this snapshot";
        Err(io::Error::new(io::ErrorKind::Unsupported, reason))
    }
}

/// The sections that every start reads.
struct Read {
    header: Header,
    manifest: Manifest,
    machine_state: Vec<u8>,
    zero_map: PageSet,
}

impl Read {
    fn container(header: Header, container: &dyn ReadAt, path: &Path) -> Result<Self, OpenError> {
        let section = |section| header.read_section(container, path, section);
        let manifest = decode_manifest(section(Section::Manifest)?, header.version, path)?;
        let zero_map = section(Section::ZeroMap)?;
        let zero_map = decode_zero_map(&zero_map, manifest.layout.pages(), path)?;
        check_consistent(&header, &manifest, &zero_map, path)?;
        let machine_state = section(Section::MachineState)?;
        Ok(Self { header, manifest, machine_state, zero_map })
    }

    fn into_snapshot(
        self,
        path: &Path,
        container: Arc<dyn ReadAt>,
        container_path: PathBuf,
        image: Content,
        overlay: Option<Content>,
    ) -> Snapshot {
        let Self { header, manifest, machine_state, zero_map } = self;
        let digests_start = header.range(Section::Digests).start;
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
            signed: None,
            image_again: None,
            packed_files: Default::default(),
            packed: Default::default(),
            zero_map,
            image,
            overlay,
            digests,
        }
    }
}
