use std::fs;
use std::path::PathBuf;

use uuid::Uuid;

use super::*;
use crate::tests::support::{
    Memory, description, destination, file_with, freeze_generation, machine, names_in,
    open_generation,
};
use crate::{
    Contents, Destination, FreezeRequest, Profile, Snapshot, VerifyError, freeze_signed,
    set_profile, verify_signed,
};

/// A signed snapshot, and the directory that holds it and its key.
struct Signed {
    _dir: tempfile::TempDir,
    path: PathBuf,
    signer: Signer,
}

impl Signed {
    fn new() -> Self {
        let (dir, path) = destination();
        freeze_generation(&path, 3);
        let signer = Signer::read_or_make(&dir.path().join("key.pem"), "alice").unwrap();
        sign(&path, &signer).unwrap();
        Self { _dir: dir, path, signer }
    }

    /// A key with which tenants other than `alice` sign, or `alice` elsewhere.
    fn other(&self, key: &str, tenant: &str) -> Signer {
        Signer::read_or_make(&self.path.with_file_name(key), tenant).unwrap()
    }

    fn open(&self) -> Result<Snapshot, OpenError> {
        Snapshot::open_signed(&self.path, Some(&self.signer.verifier()))
    }

    fn edit(&self, file: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        let path = self.path.join(file);
        let mut bytes = fs::read(&path).unwrap();
        edit(&mut bytes);
        fs::write(path, bytes).unwrap();
    }

    /// Asserts that opening fails for the signature, with this text.
    fn refused(&self, text: &str) {
        let error = self.open().unwrap_err();
        assert!(
            matches!(
                error,
                OpenError::Unsigned { .. }
                    | OpenError::Signature { .. }
                    | OpenError::NotSigned { .. }
            ),
            "{error:?}"
        );
        let found = error.to_string();
        assert!(found.contains(text) && found.contains("firn verify --signing-key"), "{found}");
        // Verification reports the same, also where it would list problems of a snapshot.
        let verifier = self.signer.verifier();
        let verified = verify_signed(&self.path, Some(&verifier), &mut |_, _| ()).unwrap_err();
        assert_eq!(verified.to_string(), found);
    }
}

#[test]
fn a_signed_snapshot_opens_with_and_without_its_key() {
    let signed = Signed::new();
    let snapshot = signed.open().unwrap();
    snapshot.check_signed_files().unwrap();
    let mut page = vec![0; 4096];
    snapshot.image().read_exact_at(&mut page, 15 * 4096).unwrap();
    // The digests, which are not signed, are read from the file.
    snapshot.digests().check(15, &page).unwrap();
    assert_eq!(open_generation(&signed.path), 3);
    let verifier = signed.signer.verifier();
    verify_signed(&signed.path, Some(&verifier), &mut |_, _| ()).unwrap();
    assert_eq!(fs::metadata(signed.path.join(SIGNATURE_FILE)).unwrap().len(), 168);
}

#[test]
fn a_freeze_signs_before_it_publishes() {
    let (dir, path) = destination();
    let signer = Signer::read_or_make(&dir.path().join("key.pem"), "alice").unwrap();
    let (memory, disk) = (Memory::zeroed(600), file_with(b"disk"));
    let mut disk = &disk;
    let mut contents = Contents::new(&memory, machine(description(), b"")).with_disk(&mut disk);
    let destination = Destination::Directory(path.clone());
    let request = FreezeRequest { destination, dense: false, function: None };
    freeze_signed(&mut contents, request, Some(&signer)).unwrap();
    let snapshot = Snapshot::open_signed(&path, Some(&signer.verifier())).unwrap();
    snapshot.check_signed_files().unwrap();
    assert_eq!(names_in(dir.path()), ["key.pem", "snapshot"]);
    // A signed snapshot is replaced as a whole.
    freeze_generation(&path, 4);
    assert_eq!(names_in(&path), ["memory.img", "overlay.img", "snapshot.firn"]);
}

#[test]
fn signatures_of_others_are_refused() {
    let signed = Signed::new();
    for other in [signed.other("bob.pem", "bob"), signed.other("new.pem", "alice")] {
        sign(&signed.path, &other).unwrap();
        signed.refused("snapshot.sig has no valid signature for the tenant \"alice\"");
        Snapshot::open_signed(&signed.path, Some(&other.verifier())).unwrap();
    }
    // With one key for two tenants.
    sign(&signed.path, &signed.other("key.pem", "bob")).unwrap();
    signed.refused("no valid signature for the tenant \"alice\"");
    sign(&signed.path, &signed.signer).unwrap();
    signed.open().unwrap();
}

#[test]
fn every_bit_of_the_signature_file_counts() {
    let signed = Signed::new();
    for byte in 0..168 {
        signed.edit(SIGNATURE_FILE, |bytes| bytes[byte] ^= 1);
        signed.refused("no valid signature");
        signed.edit(SIGNATURE_FILE, |bytes| bytes[byte] ^= 1);
    }
    signed.open().unwrap();
    for len in [167, 64, 1, 0] {
        signed.edit(SIGNATURE_FILE, |bytes| bytes.truncate(len));
        signed.refused("no valid signature");
    }
    fs::remove_file(signed.path.join(SIGNATURE_FILE)).unwrap();
    signed.refused("snapshot.sig is missing: the snapshot is not signed");
}

#[test]
fn nothing_is_parsed_before_its_signature_is_checked() {
    let signed = Signed::new();
    let bytes = fs::read(signed.path.join(CONTAINER_FILE)).unwrap();
    let signed_len = bytes.len() - usize::try_from(digests_len(16)).unwrap();
    for byte in 0..signed_len {
        signed.edit(CONTAINER_FILE, |bytes| bytes[byte] ^= 1);
        signed.refused("snapshot.firn is not the file that was signed");
        signed.edit(CONTAINER_FILE, |bytes| bytes[byte] ^= 1);
    }
    // What is no snapshot at all is refused for its signature, not for what it is.
    for other in [&b""[..], b"not a container", &[0xff; 1 << 16]] {
        fs::write(signed.path.join(CONTAINER_FILE), other).unwrap();
        signed.refused("snapshot.firn is not the file that was signed");
    }
    fs::remove_file(signed.path.join(SIGNATURE_FILE)).unwrap();
    signed.refused("snapshot.sig is missing");
}

#[test]
fn checked_bytes_are_not_read_from_the_file_again() {
    let signed = Signed::new();
    set_profile(&signed.path, &Profile::of(Uuid::from_u128(3))).unwrap();
    sign(&signed.path, &signed.signer).unwrap();
    let snapshot = signed.open().unwrap();
    let path = signed.path.join(CONTAINER_FILE);
    let len = fs::metadata(&path).unwrap().len();
    // In place, as only a process with access to the file can do it.
    fs::write(&path, vec![0xff; usize::try_from(len).unwrap()]).unwrap();
    assert!(snapshot.profile().unwrap().is_some());
    let mut page = vec![0; 4096];
    snapshot.image().read_exact_at(&mut page, 15 * 4096).unwrap();
    snapshot.digests().check(15, &page).unwrap_err();
}

#[test]
fn a_signature_that_covers_less_than_the_sections_is_refused() {
    let signed = Signed::new();
    let directory = open_directory(&signed.path).unwrap();
    let whole = Statement::of(&directory, &signed.path).unwrap();
    let bytes = fs::read(signed.path.join(CONTAINER_FILE)).unwrap();
    let short = usize::try_from(whole.len).unwrap() - 1;
    let container = Sha256::digest(&bytes[..short]).into();
    let less = Statement { len: short as u64, container, ..whole }.encode();
    let file = [&signed.signer.sign(&less)[..], &less].concat();
    fs::write(signed.path.join(SIGNATURE_FILE), file).unwrap();
    signed.refused("snapshot.firn is not the file that was signed");
}

#[test]
fn image_and_disk_are_checked_where_they_are_read() {
    for file in [IMAGE_FILE, OVERLAY_FILE] {
        let signed = Signed::new();
        signed.edit(file, |bytes| *bytes.last_mut().unwrap() ^= 1);
        // A start does not read them.
        let error = signed.open().unwrap().check_signed_files().unwrap_err().to_string();
        assert!(error.contains(&format!("{file} is not the file that was signed")), "{error}");
        let verifier = signed.signer.verifier();
        let verified = verify_signed(&signed.path, Some(&verifier), &mut |_, _| ()).unwrap_err();
        let VerifyError::Damaged { problems, .. } = verified else { panic!("{verified}") };
        assert!(problems[0].to_string() == error, "{problems:?}");
    }
}

#[test]
fn a_changed_profile_needs_a_new_signature() {
    let signed = Signed::new();
    set_profile(&signed.path, &Profile::of(Uuid::from_u128(3))).unwrap();
    signed.refused("snapshot.sig is missing");
    sign(&signed.path, &signed.signer).unwrap();
    assert!(signed.open().unwrap().profile().unwrap().is_some());
}

#[test]
fn what_is_no_snapshot_is_not_signed() {
    let signed = Signed::new();
    signed.edit(CONTAINER_FILE, |bytes| bytes.truncate(100));
    let error = sign(&signed.path, &signed.signer).unwrap_err().to_string();
    assert!(error.contains("cannot be signed"), "{error}");
}
