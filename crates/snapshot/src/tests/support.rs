//! Shared functions of the tests of whole snapshots.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use firn_pool::{CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::extent::{ExtentPlan, ExtentTarget};
use crate::transfer::{Pieces, Received, Receiver, Sender};
use crate::{
    Chunk, Contents, CpuFeatures, CpuRequirement, CpuidRegister, Description, Destination,
    DiskSource, Freeze, FreezeReport, FreezeRequest, FunctionInfo, ImageKind, Machine,
    MemoryLayout, NotFrozen, PageSource, ReadAt, Snapshot,
};

/// Guest memory in a vector.
pub(crate) struct Memory {
    pub(crate) layout: MemoryLayout,
    pub(crate) bytes: Vec<u8>,
    /// Return the bytes in the buffer, like a source without addressable memory.
    pub(crate) through_buffer: bool,
}

impl Memory {
    /// Memory of `pages` zero pages in firn's default layout.
    pub(crate) fn zeroed(pages: u64) -> Self {
        Self::with_layout(MemoryLayout::for_size(pages * 4096).unwrap())
    }

    /// Memory that is all zero.
    pub(crate) fn with_layout(layout: MemoryLayout) -> Self {
        let bytes = vec![0; usize::try_from(layout.total_bytes()).unwrap()];
        Self { layout, bytes, through_buffer: false }
    }

    /// Fills one image page with a byte.
    pub(crate) fn fill(&mut self, page: usize, byte: u8) {
        self.bytes[page * 4096..][..4096].fill(byte);
    }
}

impl PageSource for Memory {
    fn layout(&self) -> &MemoryLayout {
        &self.layout
    }

    fn chunk<'a>(&'a self, image_offset: u64, buf: &'a mut [u8]) -> io::Result<Chunk<'a>> {
        let bytes = &self.bytes[usize::try_from(image_offset).unwrap()..][..buf.len()];
        if self.through_buffer {
            buf.copy_from_slice(bytes);
            return Ok(Chunk::Bytes(buf));
        }
        Ok(if bytes.iter().all(|&byte| byte == 0) { Chunk::Zero } else { Chunk::Bytes(bytes) })
    }
}

/// A description with all fields set to fixed values.
pub(crate) fn description() -> Description {
    Description {
        id: Uuid::from_u128(0x1234_5678_9abc_def0),
        parent: Some(Uuid::from_u128(7)),
        created_ns: 1_760_000_000_000_000_000,
        firn_version: "0.1.0".into(),
        vcpus: 2,
        cpu: CpuRequirement {
            vendor: "AuthenticAMD".into(),
            brand: "A processor".into(),
            features: vec![CpuFeatures {
                leaf: 7,
                subleaf: 0,
                register: CpuidRegister::Ebx,
                bits: 0x20,
            }],
        },
        disks: vec![],
        function: Some(FunctionInfo { name: "hello".into(), handler: "hello.handler".into() }),
    }
}

/// A path for a snapshot in a new directory, which is removed with the guard.
pub(crate) fn destination() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    (dir, path)
}

/// A pool in memory and its manager.
pub(crate) struct Managed {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) medium: Arc<MappedMedium>,
    _server: Server,
}

impl Managed {
    /// A pool of `size` bytes.
    pub(crate) fn new(size: u64) -> Self {
        let options = MemfdOptions { size, huge: None, node: None };
        let medium = Arc::new(MappedMedium::memfd(options).unwrap());
        let pool = Pool::create(medium.clone(), &CreateOptions::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(&dir.path().join("pool.sock"), pool).unwrap();
        Self { dir, medium, _server: server }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("pool.sock")
    }
}

/// Bytes in a vector, which another process can change.
#[derive(Debug)]
pub(crate) struct Bytes(pub(crate) Mutex<Vec<u8>>);

impl Bytes {
    pub(crate) fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(bytes)))
    }
}

impl ReadAt for Bytes {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.lock().len() as u64)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let bytes = self.0.lock();
        let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..));
        let bytes = rest.and_then(|rest| rest.get(..buf.len()));
        buf.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A temporary file with these bytes.
pub(crate) fn file_with(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// A machine of this description and state.
pub(crate) fn machine(description: Description, state: &[u8]) -> Machine {
    Machine { description, state_version: 3, state: state.to_vec(), reported: Vec::new() }
}

/// Freezes any machine.
pub(crate) fn freeze_to<M: Freeze>(
    machine: &mut M,
    destination: Destination,
    kind: ImageKind,
) -> Result<FreezeReport, NotFrozen<M::Error>> {
    let dense = kind == ImageKind::Dense;
    let request = FreezeRequest { destination, dense, function: None };
    crate::freeze(machine, request).map_err(|error| error.source)
}

/// Freezes `memory` and an optional `overlay`.
pub(crate) fn freeze(
    path: &Path,
    memory: &mut Memory,
    kind: ImageKind,
    overlay: Option<&[u8]>,
    description: Description,
    machine_state: &[u8],
) -> FreezeReport {
    let file = overlay.map(file_with);
    let mut disk = file.as_ref();
    let mut contents = Contents::new(memory, machine(description, machine_state));
    if let Some(disk) = &mut disk {
        contents = contents.with_disk(disk);
    }
    freeze_to(&mut contents, Destination::Directory(path.to_owned()), kind).unwrap()
}

/// Freezes a small snapshot. Every part contains its generation.
pub(crate) fn freeze_generation(path: &Path, generation: u8) {
    let mut memory = Memory::zeroed(16);
    // The set of zero pages depends on the generation too, and one page is never zero.
    memory.fill(usize::from(generation) % 15, generation);
    memory.fill(15, generation);
    let overlay = vec![generation; 8192 + usize::from(generation)];
    let id = Uuid::from_u128(u128::from(generation));
    let description = Description { id, ..description() };
    let state = [generation; 100];
    freeze(path, &mut memory, ImageKind::Sparse, Some(&overlay), description, &state);
}

/// Opens a snapshot of [`freeze_generation`], checks that all its parts are of one generation, and
/// returns that generation.
pub(crate) fn open_generation(path: &Path) -> u8 {
    let snapshot = Snapshot::open(path).unwrap();
    let (_, state) = snapshot.machine_state();
    let generation = state[0];
    assert_eq!(state, [generation; 100]);
    let id = snapshot.manifest().description.id;
    assert_eq!(id, Uuid::from_u128(u128::from(generation)));
    let mut image = vec![0; 16 * 4096];
    FileExt::read_exact_at(snapshot.image_file().unwrap(), &mut image, 0).unwrap();
    snapshot.digests().check(0, &image).unwrap();
    assert!(image[15 * 4096..] == [generation; 4096]);
    assert!(!snapshot.zero_map().get(u64::from(generation) % 15));
    let mut overlay = vec![0; 8192 + usize::from(generation)];
    ReadAt::read_exact_at(snapshot.overlay().unwrap(), &mut overlay, 0).unwrap();
    assert!(overlay.iter().all(|&byte| byte == generation));
    generation
}

/// The names in a directory, sorted.
pub(crate) fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Has a machine pass an extent, and writes it.
pub(crate) fn pass_extent(
    plan: ExtentPlan,
    machine: &Machine,
    memory: &Memory,
    disk: Option<&mut dyn DiskSource>,
    target: &dyn ExtentTarget,
) -> (FreezeReport, Received) {
    let (guest_bytes, tail_bytes) = (plan.guest_bytes(), plan.tail_bytes());
    let pieces = Pieces { guest_bytes, tail_bytes };
    let (receiver, passed) = Receiver::new(target, pieces, Duration::from_secs(60)).unwrap();
    let mut report = FreezeReport::default();
    let pass = || {
        let sender = Sender::new(passed.try_into().unwrap());
        plan.pass(machine, memory, disk, &sender, &mut report).unwrap();
    };
    let ((), received) = receiver.during(pass, || panic!("the machine has answered"));
    target.flush().unwrap();
    (report, received.unwrap())
}
