//! Checking every byte of a snapshot.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use firn_base::{GuestRange, PAGE_SIZE, processors};
use parking_lot::Mutex;
use thiserror::Error;

use crate::container::Header;
use crate::decode::{check_consistent, decode_manifest, decode_zero_map};
use crate::digests::{DigestError, Digests, PAGE_LEN, page_digest};
use crate::directory::{
    MAX_ATTEMPTS, open_container, open_directory, open_file, open_with_len, was_replaced,
};
use crate::disk::{DiskError, digest_with_progress};
use crate::error::OpenError;
use crate::files::{CONTAINER_FILE, IMAGE_FILE, OVERLAY_FILE, PackedFile, SIGNATURE_FILE};
use crate::image::is_zero;
use crate::keys::Verifier;
use crate::layout::{CHUNK_PAGES, CHUNK_SIZE, MemoryLayout};
use crate::manifest::{DiskIdentity, Manifest};
use crate::packed::{Packed, PackedError};
use crate::page_set::PageSet;
use crate::protect::check_protection;
use crate::read_at::{ReadAt, next_data};
use crate::section::Section;
use crate::signature::{Opened, Statement, open_checked};

/// Maximum number of threads that check the image; each has a buffer of 2 MiB.
const MAX_THREADS: usize = 4;
/// Maximum number of listed runs of bad pages and of listed read errors. Further ones are only
/// counted.
const MAX_LISTED: usize = 16;

/// The result of a successful [`verify`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// Pages of the image, each checked against its digest and the zero map.
    pub pages: u64,
    /// The zero pages among them.
    pub zero_pages: u64,
    /// Pages of the files that were packed from the image, each checked against its digest.
    pub packed_pages: u64,
    /// Bytes of the disks (overlay and read-only ones), each checked against its digest.
    pub disk_bytes: u64,
    /// The files that fs-verity protects, with the digests that the manifest names.
    pub protected: Vec<String>,
    /// How long it took.
    pub duration: Duration,
}

/// Why [`verify`] failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The snapshot cannot be examined: it does not exist, has an unsupported version or
    /// architecture, or has a damaged header.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Parts of it are damaged.
    #[error("{} is damaged:{}\nfreeze again, or copy the snapshot again from where it is whole", .path.display(), list(.problems))]
    Damaged {
        /// The snapshot's directory.
        path: PathBuf,
        /// All problems found.
        problems: Vec<Problem>,
    },
}

/// One problem of a snapshot.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Problem {
    /// A section or a file is damaged, as opening reports it.
    #[error(transparent)]
    Part(#[from] OpenError),
    /// The digests of a chunk are damaged, so its pages were not compared.
    #[error(transparent)]
    Digests(#[from] DigestError),
    /// Pages differ from the frozen ones.
    #[error("{IMAGE_FILE}: {total} damaged pages, at guest-physical {}", list_ranges(.runs, *.total))]
    Pages {
        /// Damaged pages.
        total: u64,
        /// The first runs of them, by guest-physical address.
        runs: Vec<GuestRange>,
    },
    /// Part of a file cannot be read.
    #[error("{} cannot be read at offset {offset:#x}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Offset in bytes.
        offset: u64,
        /// Why it failed.
        source: io::Error,
    },
    /// The writable disk differs from the frozen one.
    #[error("{OVERLAY_FILE} is damaged: its digest does not match")]
    Overlay,
    /// A packed file cannot be used.
    #[error(transparent)]
    Packed(#[from] PackedError),
    /// Pages of a packed file differ from the frozen ones.
    #[error(
        "{file}: {total} damaged pages, the first is page {first:#x} of the image; pack it again"
    )]
    PackedPages {
        /// The file's name.
        file: &'static str,
        /// Damaged pages.
        total: usize,
        /// The first of them, by its number in the image.
        first: u64,
    },
    /// A read-only disk is missing, or differs from the one at the freeze.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// The files of a snapshot that could be opened, and the decoded parts of `snapshot.firn`.
struct Parts {
    path: PathBuf,
    container: Arc<dyn ReadAt>,
    statement: Option<Statement>,
    header: Header,
    manifest: Option<Manifest>,
    zero_map: Option<PageSet>,
    image: Option<File>,
    overlay: Option<File>,
    packed: Vec<(PackedFile, File)>,
    problems: Vec<Problem>,
}

/// Checks all of the snapshot in directory `path`: every section, every page of the image against
/// its digest and the zero map, every page of the packed files, and the digests of the overlay and
/// the read-only disks.
///
/// `progress` is called from this thread with the bytes checked so far and the total. Verification
/// only reads, and may run while the snapshot is in use.
///
/// # Errors
/// [`VerifyError`]; it lists all damage.
pub fn verify(
    path: impl AsRef<Path>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, VerifyError> {
    verify_signed(path, None, progress)
}

/// The same. If there is a verifier, nothing is parsed before it has confirmed `snapshot.firn`, and
/// image and writable disk must be the files that were signed.
///
/// # Errors
/// See [`verify`].
pub fn verify_signed(
    path: impl AsRef<Path>,
    verifier: Option<&Verifier>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, VerifyError> {
    check(path.as_ref(), verifier, true, progress)
}

/// The same without the files' protection by fs-verity.
pub(crate) fn verify_content(
    path: &Path,
    verifier: Option<&Verifier>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, VerifyError> {
    check(path, verifier, false, progress)
}

fn check(
    path: &Path,
    verifier: Option<&Verifier>,
    protection: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, VerifyError> {
    let start = Instant::now();
    let mut parts = open_parts(path, verifier)?;
    parts.check_signed_files();
    if protection {
        parts.check_protection();
    }
    let protected = parts.manifest.iter().flat_map(|manifest| &manifest.protected);
    let mut report = VerifyReport {
        pages: 0,
        zero_pages: 0,
        packed_pages: 0,
        disk_bytes: 0,
        protected: protected.map(|file| file.name.clone()).collect(),
        duration: Duration::ZERO,
    };
    if let Err(error) = parts.check_digests_section() {
        parts.problems.push(error.into());
    }
    if let Some(manifest) = parts.manifest.take() {
        let image_bytes = manifest.layout.total_bytes();
        let disks = &manifest.description.disks;
        report.disk_bytes = disks
            .iter()
            .map(|disk| disk.identity.len)
            .chain(manifest.overlay.map(|identity| identity.len))
            .fold(0, u64::saturating_add);
        let total = image_bytes.saturating_add(report.disk_bytes);
        if let Some(zero_map) = parts.zero_map.take() {
            report.pages = manifest.layout.pages();
            report.zero_pages = zero_map.count();
            parts.check_image(&manifest.layout, &zero_map, &mut |done| progress(done, total));
        }
        report.packed_pages = parts.check_packed(&manifest);
        let mut before = image_bytes;
        if let Some(identity) = manifest.overlay {
            parts.check_overlay(identity, &mut |done| {
                progress(before.saturating_add(done).min(total), total);
            });
            before = before.saturating_add(identity.len);
        }
        for disk in disks {
            let result =
                disk.check(&mut |done| progress(before.saturating_add(done).min(total), total));
            parts.problems.extend(result.err().map(Problem::from));
            before = before.saturating_add(disk.identity.len);
        }
        progress(total, total);
    }
    if !parts.problems.is_empty() {
        return Err(VerifyError::Damaged { path: parts.path, problems: parts.problems });
    }
    report.duration = start.elapsed();
    Ok(report)
}

/// Opens everything that can be opened.
fn open_parts(path: &Path, verifier: Option<&Verifier>) -> Result<Parts, OpenError> {
    for _ in 0..MAX_ATTEMPTS {
        let dir = open_directory(path)?;
        let parts = open_parts_in(&dir, path, verifier);
        let whole = parts.as_ref().is_ok_and(|parts| parts.problems.is_empty());
        if whole || !was_replaced(&dir, path) {
            return parts;
        }
    }
    Err(OpenError::Replaced { path: path.into(), attempts: MAX_ATTEMPTS })
}

fn open_parts_in(
    dir: &OwnedFd,
    path: &Path,
    verifier: Option<&Verifier>,
) -> Result<Parts, OpenError> {
    let container_path = path.join(CONTAINER_FILE);
    let container = open_container(dir, path)?;
    let signature = match open_file(dir, path, SIGNATURE_FILE) {
        Err(OpenError::MissingFile { .. }) => None,
        file => Some(file?),
    };
    let Opened { container, header, statement } =
        open_checked(container, signature.as_ref(), path, verifier)?;
    let mut problems = Vec::new();
    let mut keep = |error: OpenError| problems.push(Problem::from(error));
    let section = |section| header.read_section(&container, &container_path, section);
    let manifest = section(Section::Manifest)
        .and_then(|bytes| decode_manifest(bytes, header.version, &container_path))
        .map_err(&mut keep)
        .ok();
    section(Section::MachineState).map_err(&mut keep).ok();
    section(Section::Profile).map_err(&mut keep).ok();
    let zero_map = section(Section::ZeroMap).map_err(&mut keep).ok();
    let mut parts = Parts {
        path: path.into(),
        container,
        statement,
        header,
        manifest,
        zero_map: None,
        image: None,
        overlay: None,
        packed: vec![],
        problems: vec![],
    };
    if let Some(manifest) = &parts.manifest {
        let pages = manifest.layout.pages();
        let consistent = zero_map.map(|bytes| {
            let zero_map = decode_zero_map(&bytes, pages, &container_path)?;
            check_consistent(&parts.header, manifest, &zero_map, &container_path)?;
            Ok(zero_map)
        });
        parts.zero_map = consistent.and_then(|zero_map| zero_map.map_err(&mut keep).ok());
        parts.image = open_with_len(dir, path, IMAGE_FILE, manifest.layout.total_bytes())
            .map_err(&mut keep)
            .ok();
        parts.overlay = manifest.overlay.and_then(|identity| {
            open_with_len(dir, path, OVERLAY_FILE, identity.len).map_err(&mut keep).ok()
        });
    }
    for kind in PackedFile::ALL {
        match open_file(dir, path, kind.name()) {
            Ok(file) => parts.packed.push((kind, file)),
            Err(OpenError::MissingFile { .. }) => {}
            Err(error) => keep(error),
        }
    }
    parts.problems = problems;
    Ok(parts)
}

impl Parts {
    /// Checks image and writable disk, if the snapshot is one that must be signed.
    fn check_signed_files(&mut self) {
        let (Some(statement), Some(image)) = (&self.statement, &self.image) else { return };
        let overlay = self.overlay.as_ref().map(|overlay| overlay as &dyn ReadAt);
        let checked = statement.check_files(image, overlay, &self.path);
        self.problems.extend(checked.err().map(Problem::from));
    }

    /// Checks the files that the manifest names as protected by fs-verity. A packed file that is
    /// not there needs no protection.
    fn check_protection(&mut self) {
        let Some(manifest) = &self.manifest else { return };
        let files = [(IMAGE_FILE, self.image.as_ref()), (OVERLAY_FILE, self.overlay.as_ref())];
        let packed = self.packed.iter().map(|(kind, file)| (kind.name(), Some(file)));
        for (name, file) in files.into_iter().chain(packed) {
            let Some(file) = file else { continue };
            let result = check_protection(file, &self.path.join(name), manifest.protection(name));
            self.problems.extend(result.err().map(Problem::from));
        }
    }

    /// Checks the CRC of the digests section in pieces.
    fn check_digests_section(&self) -> Result<(), OpenError> {
        let (path, section) = (self.path.join(CONTAINER_FILE), Section::Digests);
        let mut crc = crc32fast::Hasher::new();
        let mut buf = vec![0; 1 << 20];
        let mut range = self.header.range(section);
        while !range.is_empty() {
            let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
            let bytes = &mut buf[..len.min(1 << 20)];
            if let Err(source) = self.container.read_exact_at(bytes, range.start) {
                return Err(OpenError::Io { path, action: "read", source });
            }
            crc.update(bytes);
            range.start += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        }
        if crc.finalize() == self.header.entry(section).crc {
            Ok(())
        } else {
            Err(OpenError::Damaged { path, section })
        }
    }

    fn check_image(
        &mut self,
        layout: &MemoryLayout,
        zero_map: &PageSet,
        progress: &mut dyn FnMut(u64),
    ) {
        let digests = self.digests(layout);
        let Some(image) = &self.image else { return };
        let path = self.path.join(IMAGE_FILE);
        let check = ImageCheck::new(image, path, layout, zero_map, &digests);
        self.problems.extend(check.run(progress));
    }

    /// The digests of all pages, not yet read.
    fn digests(&self, layout: &MemoryLayout) -> Digests {
        let path = self.path.join(CONTAINER_FILE);
        let start = self.header.range(Section::Digests).start;
        Digests::new(Arc::clone(&self.container), path, start, layout.pages())
    }

    /// Checks the packed files, and returns the number of pages in them.
    fn check_packed(&mut self, manifest: &Manifest) -> u64 {
        if self.packed.is_empty() {
            return 0;
        }
        let digests = self.digests(&manifest.layout);
        let (id, pages, mut checked) = (manifest.description.id, manifest.layout.pages(), 0);
        for (kind, file) in std::mem::take(&mut self.packed) {
            let packed = Packed::read(file, self.path.join(kind.name()), kind, id, pages);
            match packed.and_then(|packed| Ok((packed.damaged(&digests)?, packed))) {
                Ok((damaged, packed)) => {
                    checked += packed.runs().iter().map(|packed| packed.run.pages).sum::<u64>();
                    if let Some(&first) = damaged.first() {
                        let (file, total) = (kind.name(), damaged.len());
                        self.problems.push(Problem::PackedPages { file, total, first });
                    }
                }
                Err(error) => self.problems.push(error.into()),
            }
        }
        checked
    }

    fn check_overlay(&mut self, identity: DiskIdentity, progress: &mut dyn FnMut(u64)) {
        let Some(overlay) = &self.overlay else { return };
        match digest_with_progress(overlay, progress) {
            Ok(found) if found == identity => {}
            Ok(_) => self.problems.push(Problem::Overlay),
            Err(source) => {
                let path = self.path.join(OVERLAY_FILE);
                self.problems.push(Problem::Read { path, offset: 0, source });
            }
        }
    }
}

/// The check of all pages of an image, shared by its threads.
struct ImageCheck<'a> {
    image: &'a File,
    path: PathBuf,
    layout: &'a MemoryLayout,
    zero_map: &'a PageSet,
    digests: &'a Digests,
    zero_digest: u64,
    next_chunk: AtomicU64,
    done_bytes: AtomicU64,
    found: Mutex<Found>,
}

/// The problems that the threads found.
struct Found {
    bad_pages: PageSet,
    problems: Vec<Problem>,
}

impl<'a> ImageCheck<'a> {
    fn new(
        image: &'a File,
        path: PathBuf,
        layout: &'a MemoryLayout,
        zero_map: &'a PageSet,
        digests: &'a Digests,
    ) -> Self {
        let bad_pages = PageSet::new(layout.pages());
        Self {
            image,
            path,
            layout,
            zero_map,
            digests,
            zero_digest: page_digest(&[0; PAGE_LEN]),
            next_chunk: AtomicU64::new(0),
            done_bytes: AtomicU64::new(0),
            found: Mutex::new(Found { bad_pages, problems: Vec::new() }),
        }
    }

    /// Checks all chunks on several threads, including this one.
    fn run(self, progress: &mut dyn FnMut(u64)) -> Vec<Problem> {
        let threads = processors().min(MAX_THREADS);
        thread::scope(|scope| {
            for _ in 1..threads {
                // If the thread cannot start, the others do its work.
                let _ =
                    thread::Builder::new().spawn_scoped(scope, || self.check_chunks(&mut |_| ()));
            }
            self.check_chunks(progress);
        });
        let Found { bad_pages, mut problems } = self.found.into_inner();
        let total = bad_pages.count();
        if total > 0 {
            let runs = guest_runs(&bad_pages, self.layout).take(MAX_LISTED).collect();
            problems.push(Problem::Pages { total, runs });
        }
        problems
    }

    fn check_chunks(&self, progress: &mut dyn FnMut(u64)) {
        let mut buf = vec![0; usize::try_from(CHUNK_SIZE).unwrap_or(usize::MAX)];
        loop {
            let chunk = self.next_chunk.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.layout.chunks() {
                return;
            }
            let offset = chunk * CHUNK_SIZE;
            let len = CHUNK_SIZE.min(self.layout.total_bytes() - offset);
            let bytes = &mut buf[..usize::try_from(len).unwrap_or(usize::MAX)];
            if let Err(source) = self.check_chunk(chunk, offset, bytes) {
                self.note(Problem::Read { path: self.path.clone(), offset, source });
            }
            let done = self.done_bytes.fetch_add(len, Ordering::Relaxed) + len;
            progress(done);
        }
    }

    fn check_chunk(&self, chunk: u64, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let end = offset + u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if next_data(self.image, offset)?.is_some_and(|data| data.start < end) {
            self.image.read_exact_at(bytes, offset)?;
        } else {
            bytes.fill(0);
        }
        let record = match self.digests.read_record(chunk) {
            Ok(record) => Some(record),
            Err(error) => {
                self.note(error.into());
                None
            }
        };
        for (index, page) in bytes.chunks_exact(PAGE_LEN).enumerate() {
            let image_page = chunk * CHUNK_PAGES + u64::try_from(index).unwrap_or(u64::MAX);
            let zero = is_zero(page);
            let digest_matches = record.as_ref().is_none_or(|record| {
                record[index] == if zero { self.zero_digest } else { page_digest(page) }
            });
            if !digest_matches || zero != self.zero_map.get(image_page) {
                self.found.lock().bad_pages.insert(image_page);
            }
        }
        Ok(())
    }

    fn note(&self, problem: Problem) {
        let problems = &mut self.found.lock().problems;
        if problems.len() < MAX_LISTED {
            problems.push(problem);
        }
    }
}

/// The runs of a set of image pages, by guest-physical address; a run never spans two regions.
fn guest_runs(pages: &PageSet, layout: &MemoryLayout) -> impl Iterator<Item = GuestRange> {
    layout.regions().flat_map(move |region| {
        pages.ranges_in(region.image_pages()).map(move |pages| GuestRange {
            start: region.guest_addr + pages.start * PAGE_SIZE - region.image_offset,
            len: (pages.end - pages.start) * PAGE_SIZE,
        })
    })
}

/// Formats problems, one per line, with all causes.
fn list(problems: &[Problem]) -> String {
    use std::error::Error;
    let mut text = String::new();
    for problem in problems {
        text.push_str(&format!("\n- {problem}"));
        let mut cause = problem.source();
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
    }
    text
}

fn list_ranges(ranges: &[GuestRange], total: u64) -> String {
    let listed: u64 = ranges.iter().map(GuestRange::pages).sum();
    let ranges = ranges.iter().map(page_addresses).collect::<Vec<_>>().join(", ");
    if listed < total { format!("{ranges} and {} more", total - listed) } else { ranges }
}

/// The address of a page, or the first and the last address of several.
fn page_addresses(range: &GuestRange) -> String {
    match range.pages() {
        0 | 1 => format!("{:#x}", range.start),
        _ => format!("{:#x}-{:#x}", range.start, range.end() - 1),
    }
}
