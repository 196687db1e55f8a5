use std::os::unix::fs::PermissionsExt;

use super::*;

#[test]
fn each_tenant_has_a_key_that_is_made_by_its_first_snapshot() {
    let data = tempfile::tempdir().unwrap();
    let directory = data.path().join("a/keys");
    let keys = SnapshotKeys::open(&directory).unwrap();
    assert_eq!(directory.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    // A thaw makes none.
    assert!(matches!(keys.verifier(Some("alice")), Err(KeyError::Read { .. })));
    let alice = keys.signer(Some("alice")).unwrap().verifier();
    let nobody = keys.signer(None).unwrap().verifier();
    assert_ne!(alice, nobody);
    // A later daemon finds the same keys.
    let keys = SnapshotKeys::open(&directory).unwrap();
    assert_eq!(keys.verifier(Some("alice")).unwrap(), alice);
    assert_eq!(keys.verifier(None).unwrap(), nobody);
    assert!(directory.join("alice.pem").is_file() && directory.join("default.pem").is_file());
}

#[test]
fn names_of_tenants_lead_to_no_other_directory() {
    let data = tempfile::tempdir().unwrap();
    let directory = data.path().join("keys");
    let keys = SnapshotKeys::open(&directory).unwrap();
    for name in ["", ".", "..", "../x", "/etc/x", "a/b", "a.b", "\u{e4}"] {
        keys.signer(Some(name)).unwrap();
    }
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 8);
    assert_eq!(std::fs::read_dir(data.path()).unwrap().count(), 1);
}
