use std::path::PathBuf;

use firn_base::error_chain;
use firn_pool::Medium;
use uuid::Uuid;

use super::*;
use crate::tests::support::{Managed, Memory, description, file_with, machine};
use crate::{Checks, Contents, Description, Destination, FreezeRequest, Snapshot, Verify};
use crate::{freeze_signed, open_pooled};

const ID: Uuid = Uuid::from_u128(9);

struct World {
    pool: Managed,
    signer: Signer,
}

impl World {
    fn new() -> Self {
        let pool = Managed::new(64 << 20);
        let signer = Signer::read_or_make(&pool.dir.path().join("key.pem"), "alice").unwrap();
        Self { pool, signer }
    }

    fn socket(&self) -> PathBuf {
        self.pool.socket()
    }

    fn freeze(&self, signer: Option<&Signer>) {
        let mut memory = Memory::zeroed(700);
        memory.fill(699, 7);
        let disk = file_with(&[8; 9000]);
        let mut disk = &disk;
        let machine = machine(Description { id: ID, ..description() }, b"state");
        let mut contents = Contents::new(&memory, machine).with_disk(&mut disk);
        let destination = Destination::Pool { socket: self.socket(), name: "hello".into() };
        let request = FreezeRequest { destination, dense: false, function: None };
        freeze_signed(&mut contents, request, signer).unwrap();
    }

    fn open(&self, verifier: Option<&Verifier>) -> Result<Snapshot, OpenPooledError> {
        let checks = Checks { bytes: Verify::Always, signature: verifier };
        open_pooled(&self.socket(), "hello", checks).map(|(snapshot, _)| snapshot)
    }

    fn set_profile(
        &self,
        verifier: Option<&Verifier>,
        signer: Option<&Signer>,
    ) -> Result<(), AttachError> {
        set_pooled_profile(&self.socket(), "hello", &Profile::of(ID), verifier, signer)
    }

    fn verify(
        &self,
        verifier: Option<&Verifier>,
        signer: Option<&Signer>,
    ) -> Result<VerifyReport, VerifyPooledError> {
        verify_pooled(&self.socket(), "hello", verifier, signer)
    }
}

#[test]
fn a_new_profile_takes_the_signature_of_a_pooled_snapshot_unless_it_is_signed_again() {
    let world = World::new();
    let verifier = world.signer.verifier();
    world.freeze(Some(&world.signer));
    world.set_profile(Some(&verifier), Some(&world.signer)).unwrap();
    let opened = world.open(Some(&verifier)).unwrap();
    assert!(opened.profile().unwrap().is_some());
    world.set_profile(Some(&verifier), None).unwrap();
    let error = world.open(Some(&verifier)).unwrap_err().to_string();
    assert!(error.contains("not signed"), "{error}");
    // What is not confirmed gets no profile and no signature.
    let error = world.set_profile(Some(&verifier), Some(&world.signer)).unwrap_err().to_string();
    assert!(error.contains("not signed"), "{error}");
    world.open(Some(&verifier)).unwrap_err();
}

#[test]
fn pages_that_were_changed_are_not_signed_again() {
    let world = World::new();
    let verifier = world.signer.verifier();
    world.freeze(Some(&world.signer));
    let medium = &world.pool.medium;
    let holds_guest_memory = |at: &u64| {
        let mut page = [0; 4096];
        medium.load(*at, &mut page);
        page == [7; 4096]
    };
    let at = (0..64 << 20).step_by(4096).find(holds_guest_memory).unwrap();
    medium.store(at, &[6]);
    let error = world.set_profile(Some(&verifier), Some(&world.signer)).unwrap_err();
    assert!(error_chain(&error).contains("is not what was signed"), "{error}");
    assert!(world.open(Some(&verifier)).is_err());
}

#[test]
fn a_whole_snapshot_of_a_pool_is_signed_and_keeps_its_bytes() {
    let world = World::new();
    let verifier = world.signer.verifier();
    world.freeze(None);
    world.set_profile(None, None).unwrap();
    let before = world.open(None).unwrap();
    let report = world.verify(None, Some(&world.signer)).unwrap();
    assert_eq!((report.pages, report.zero_pages, report.disk_bytes), (700, 699, 9000));
    let after = world.open(Some(&verifier)).unwrap();
    let bytes = |snapshot: &Snapshot| {
        let mut image = vec![0; 700 * 4096];
        snapshot.image().read_exact_at(&mut image, 0).unwrap();
        let mut disk = vec![0; 9000];
        snapshot.overlay().unwrap().read_exact_at(&mut disk, 0).unwrap();
        (image, disk, snapshot.machine_state().1.to_vec(), snapshot.profile().unwrap())
    };
    assert!(bytes(&before) == bytes(&after));
    world.verify(Some(&verifier), None).unwrap();
    let other = Signer::read_or_make(&world.pool.dir.path().join("other.pem"), "alice").unwrap();
    let error = world.verify(Some(&other.verifier()), Some(&other)).unwrap_err();
    assert!(error_chain(&error).contains("no valid signature"), "{error}");
    world.open(Some(&verifier)).unwrap();
}
