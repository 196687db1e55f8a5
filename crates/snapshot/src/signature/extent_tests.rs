use std::path::PathBuf;

use firn_pool::Client;
use proptest::prelude::{any, proptest};

use super::*;
use crate::tests::support::{Bytes, Managed, Memory, description, file_with, machine};
use crate::{Checks, Contents, Destination, FreezeRequest, Snapshot, Verify, freeze_signed};
use crate::{open_pooled, open_replica};

const STATE: [u8; 200] = [7; 200];

/// A pool with a snapshot that was frozen with a key.
struct Signed {
    pool: Managed,
    signer: Signer,
}

impl Signed {
    fn new() -> Self {
        let pool = Managed::new(64 << 20);
        let signer = Signer::read_or_make(&pool.dir.path().join("key.pem"), "alice").unwrap();
        let signed = Self { pool, signer };
        signed.freeze(Some(&signed.signer));
        signed
    }

    fn freeze(&self, signer: Option<&Signer>) {
        let mut memory = Memory::zeroed(16);
        memory.fill(3, 3);
        let mut disk = vec![0; 10_000];
        disk[5000..5100].fill(5);
        let disk = file_with(&disk);
        let mut disk = &disk;
        let machine = machine(description(), &STATE);
        let mut contents = Contents::new(&memory, machine).with_disk(&mut disk);
        let destination = Destination::Pool { socket: self.socket(), name: "hello".into() };
        let request = FreezeRequest { destination, dense: false, function: None };
        freeze_signed(&mut contents, request, signer).unwrap();
    }

    fn socket(&self) -> PathBuf {
        self.pool.socket()
    }

    fn other(&self, key: &str, tenant: &str) -> Signer {
        Signer::read_or_make(&self.pool.dir.path().join(key), tenant).unwrap()
    }

    /// The bytes of the extent.
    fn extent(&self) -> Extent {
        let mut client = Client::connect(&self.socket()).unwrap();
        let extent = client.snapshot("hello").unwrap().map().unwrap();
        let bytes = |len| vec![0; usize::try_from(len).unwrap()];
        let mut image = bytes(extent.extent().guest_bytes);
        let mut tail = bytes(extent.extent().tail_bytes);
        extent.read_guest(0, &mut image);
        extent.read_tail(0, &mut tail);
        Extent { image, tail, verifier: self.signer.verifier() }
    }
}

/// An extent whose bytes a test changes.
struct Extent {
    image: Vec<u8>,
    tail: Vec<u8>,
    verifier: Verifier,
}

impl Extent {
    fn open(&self) -> Result<Snapshot, OpenError> {
        let tail: Arc<dyn ReadAt> = Bytes::new(self.tail.clone());
        let image = Bytes::new(self.image.clone());
        Snapshot::open_extent("hello", image, &tail, Some(&self.verifier))
    }

    /// Asserts that opening fails for the signature, with this text.
    #[track_caller]
    fn refused(&self, text: &str) {
        let error = self.open().unwrap_err();
        assert!(
            matches!(
                error,
                OpenError::UnsignedInPool { .. }
                    | OpenError::Signature { .. }
                    | OpenError::NotSignedInPool { .. }
            ),
            "{error:?}"
        );
        let found = error.to_string();
        assert!(found.contains(text) && found.contains("firn verify"), "{found}");
    }

    /// The place of the mark.
    fn mark(&self) -> usize {
        self.tail.len() - LEN
    }

    fn statement(&self) -> Statement {
        Statement::decode(self.tail[self.tail.len() - STATEMENT_LEN..].as_array().unwrap())
    }
}

#[test]
fn a_freeze_into_a_pool_signs_before_it_publishes() {
    let signed = Signed::new();
    let extent = signed.extent();
    let snapshot = extent.open().unwrap();
    snapshot.check_signed_files().unwrap();
    snapshot.digests().check(0, &extent.image).unwrap();
    let verifier = signed.signer.verifier();
    for bytes in [Verify::Always, Verify::Once, Verify::Never] {
        let checks = Checks { bytes, signature: Some(&verifier) };
        let (snapshot, _grant) = open_pooled(&signed.socket(), "hello", checks).unwrap();
        assert_eq!(snapshot.machine_state().1, STATE);
        let (snapshot, _grant) = open_replica(&signed.socket(), "hello", checks).unwrap();
        assert_eq!(snapshot.machine_state().1, STATE);
        // Without a key, nothing is required of a snapshot.
        open_pooled(&signed.socket(), "hello", bytes).unwrap();
    }
    let mut disk = vec![1; 10_000];
    snapshot.overlay().unwrap().read_exact_at(&mut disk, 0).unwrap();
    assert_eq!(disk.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 500);
}

#[test]
fn a_snapshot_that_was_frozen_without_a_key_is_refused_with_one() {
    let signed = Signed::new();
    signed.freeze(None);
    let reason = "hello in the pool is not signed";
    signed.extent().refused(reason);
    let verifier = signed.signer.verifier();
    let checks = Checks { bytes: Verify::Never, signature: Some(&verifier) };
    let error = open_pooled(&signed.socket(), "hello", checks).unwrap_err().to_string();
    assert!(error.contains(reason), "{error}");
    open_pooled(&signed.socket(), "hello", Verify::Never).unwrap();
}

#[test]
fn signatures_of_others_are_refused_in_a_pool() {
    let signed = Signed::new();
    // Another tenant, another key of this tenant, and this key for another tenant.
    for (key, tenant) in [("bob.pem", "bob"), ("new.pem", "alice"), ("key.pem", "bob")] {
        let other = signed.other(key, tenant);
        signed.freeze(Some(&other));
        signed.extent().refused("hello has no valid signature for the tenant \"alice\"");
        Extent { verifier: other.verifier(), ..signed.extent() }.open().unwrap();
    }
}

#[test]
fn nothing_of_a_tail_is_parsed_before_its_signature_is_checked() {
    let mut extent = Signed::new().extent();
    let head = usize::try_from(extent.statement().len).unwrap();
    for byte in 0..head {
        extent.tail[byte] ^= 1;
        extent.refused("the tail of hello in the pool is not what was signed");
        extent.tail[byte] ^= 1;
    }
    extent.open().unwrap();
    // What is no tail at all is refused for its signature, not for what it is.
    extent.tail[..head].fill(0xff);
    extent.refused("the tail of hello in the pool is not what was signed");
}

#[test]
fn every_byte_of_a_signature_in_a_pool_counts() {
    let mut extent = Signed::new().extent();
    let mark = extent.mark();
    for byte in mark..extent.tail.len() {
        extent.tail[byte] ^= 1;
        let is_mark = byte < mark + MARK.len();
        extent.refused(if is_mark { "is not signed" } else { "no valid signature" });
        extent.tail[byte] ^= 1;
    }
    extent.open().unwrap();
    for len in [extent.tail.len() - 1, mark, LEN, LEN - 1, 1, 0] {
        extent.tail.truncate(len);
        extent.refused("is not signed");
    }
}

#[test]
fn checked_bytes_are_not_read_from_the_medium_again() {
    let extent = Signed::new().extent();
    let bytes = Bytes::new(extent.tail.clone());
    let (tail, image): (Arc<dyn ReadAt>, _) = (bytes.clone(), Bytes::new(extent.image.clone()));
    let snapshot = Snapshot::open_extent("hello", image, &tail, Some(&extent.verifier)).unwrap();
    bytes.0.lock().fill(0xff);
    assert!(snapshot.profile().unwrap().is_none());
    snapshot.digests().check(0, &extent.image).unwrap_err();
}

#[test]
fn guest_memory_and_disk_are_compared_where_they_are_read() {
    let mut extent = Signed::new().extent();
    extent.image[3 * 4096] ^= 1;
    // A start does not read them.
    let error = extent.open().unwrap().check_signed_files().unwrap_err().to_string();
    assert!(error.contains("the guest memory of hello in the pool is not what"), "{error}");
    extent.image[3 * 4096] ^= 1;
    let disk = extent.tail.windows(100).position(|bytes| bytes == [5; 100]).unwrap();
    extent.tail[disk] ^= 1;
    let error = extent.open().unwrap().check_signed_files().unwrap_err().to_string();
    assert!(error.contains("the writable disk of hello in the pool is not what"), "{error}");
}

#[test]
fn a_signature_that_covers_less_or_more_than_the_sections_is_refused() {
    let signed = Signed::new();
    let mut extent = signed.extent();
    let whole = extent.statement();
    for len in [whole.len - 1, whole.len + 1] {
        let head = &extent.tail[..usize::try_from(len).unwrap()];
        let statement = Statement { len, container: Sha256::digest(head).into(), ..whole.clone() };
        let statement = statement.encode();
        let signature = signed.signer.sign(&statement);
        let at = extent.mark() + MARK.len();
        extent.tail[at..].copy_from_slice(&[&signature[..], &statement].concat());
        extent.refused("the tail of hello in the pool is not what was signed");
    }
}

#[test]
fn lengths_that_no_buffer_holds_are_refused() {
    let signed = Signed::new();
    let mut extent = signed.extent();
    for len in [u64::MAX, max_head() + 1, extent.tail.len() as u64 + 1] {
        let statement = Statement { len, ..extent.statement() }.encode();
        let signature = signed.signer.sign(&statement);
        let at = extent.mark() + MARK.len();
        extent.tail[at..].copy_from_slice(&[&signature[..], &statement].concat());
        extent.refused("the tail of hello in the pool is not what was signed");
    }
}

proptest! {
    #[test]
    fn no_lengths_of_a_monitor_cover_more_than_the_tail(
        guest in any::<u64>(), tail in any::<u64>(), disk in any::<u64>(), shift in 0..64,
    ) {
        let (guest, tail, disk) = (guest >> shift & !0xfff_u64, tail >> shift, disk >> shift);
        if let Some(covered) = Covered::of(guest, tail, disk) {
            assert!(covered.head <= covered.disk.start && covered.disk.end == tail);
            assert!(covered.head <= max_head());
        }
    }

    #[test]
    fn a_hostile_tail_is_never_confirmed(tail in proptest::collection::vec(any::<u8>(), 0..400)) {
        let verifier = key();
        let marked = [&tail[..], &MARK, &[0; LEN - MARK.len()]].concat();
        for tail in [tail, marked] {
            let tail: Arc<dyn ReadAt> = Bytes::new(tail);
            assert!(open_checked_tail(&tail, Path::new("hostile"), &verifier).is_err());
        }
    }
}

fn key() -> Verifier {
    let dir = tempfile::tempdir().unwrap();
    Signer::read_or_make(&dir.path().join("key.pem"), "alice").unwrap().verifier()
}
