//! Devices that write to sealed guest memory: their writes use the same copies as the guest's
//! writes.

use std::fs;

use vm_memory::{Bytes, GuestAddress};

use super::testing::{Guest, NEEDS_RESET, STATUS, WRITE};
use super::{Block, Disk, ReadOnlyDisk, Rng, VirtioDevice};
use crate::cow::testing::Sealed;
use crate::open_file::OpenFile;

const CHUNK: u64 = 2 << 20;
/// The boundary of two chunks, apart from the rings and the buffers of the test driver.
const BORDER: u64 = 6 * CHUNK;

fn started<D: VirtioDevice + 'static>(device: D, sealed: &Sealed) -> Guest<D> {
    let mut guest = Guest::with_memory(device, sealed.share().vm_memory());
    guest.start(0);
    guest
}

fn sealed() -> Sealed {
    // The rings are in the first chunk.
    Sealed::new([vec![0; 2 << 20], vec![0x11; 14 << 20]].concat())
}

fn bytes<const N: usize>(guest: &Guest<impl VirtioDevice + 'static>, address: u64) -> [u8; N] {
    let mut bytes = [0; N];
    guest.mem.read_slice(&mut bytes, GuestAddress(address)).unwrap();
    bytes
}

#[test]
fn random_bytes_are_written_across_two_chunks() {
    let sealed = sealed();
    let mut guest = started(Rng::new(None), &sealed);
    guest.add_raw(0, &[(BORDER - 32, 64, WRITE)]);
    guest.kick(0);
    assert!(guest.used(0).is_some());
    assert_ne!(bytes::<32>(&guest, BORDER - 32), [0x11; 32]);
    assert_ne!(bytes::<32>(&guest, BORDER), [0x11; 32]);
    assert_eq!(bytes::<32>(&guest, BORDER + 32), [0x11; 32]);
    // The chunk of the rings, which the driver wrote first, and the two chunks of the buffer.
    assert_eq!(guest.mem.chunk_copies().chunks, 3);
    drop(guest);
    sealed.check();
}

#[test]
fn a_disk_is_read_into_sealed_memory_and_written_from_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    fs::write(&path, [0x77; 4096]).unwrap();
    let sealed = sealed();
    let disk = Disk::ReadOnly(ReadOnlyDisk::new(OpenFile::open(&path).unwrap()).unwrap());
    let mut guest = started(Block::new(disk, "disk"), &sealed);
    // The header is in the chunk of the rings. Chunks that are only read are not copied.
    guest.mem.write_slice(&[0; 16], GuestAddress(0x10_0000)).unwrap();
    let status = BORDER + CHUNK;
    let request = [(0x10_0000, 16, 0), (BORDER - 512, 1024, WRITE), (status, 1, WRITE)];
    guest.add_raw(0, &request);
    guest.kick(0);
    assert!(guest.used(0).is_some());
    assert_eq!(bytes::<32>(&guest, BORDER - 512), [0x77; 32]);
    assert_eq!(bytes::<32>(&guest, BORDER + 480), [0x77; 32]);
    assert_eq!(bytes::<2>(&guest, status), [0, 0x11]);
    assert_eq!(guest.mem.chunk_copies().chunks, 4);
    // A guest write to a read-only disk fails: only the status is written.
    let request = [(2 * CHUNK, 16, 0), (3 * CHUNK, 512, 0), (status, 1, WRITE)];
    guest.add_raw(0, &request);
    guest.kick(0);
    assert!(guest.used(0).is_some());
    assert_eq!(guest.get(STATUS) & NEEDS_RESET, 0);
    assert_eq!(guest.mem.chunk_copies().chunks, 4);
    drop(guest);
    sealed.check();
}
