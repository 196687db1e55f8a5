use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use firn_base::error_chain;

use super::*;

#[test]
fn a_key_is_made_once_for_its_owner_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("alice.pem");
    let made = Signer::read_or_make(&path, "alice").unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let read = Signer::read_or_make(&path, "alice").unwrap();
    assert_eq!(made.verifier(), read.verifier());
    let other = Signer::read_or_make(&dir.path().join("bob.pem"), "alice").unwrap();
    assert_ne!(made.verifier(), other.verifier());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn a_signature_is_of_one_key_for_one_tenant_and_one_statement() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key.pem");
    let signer = |tenant| Signer::read_or_make(&path, tenant).unwrap();
    let signature = signer("alice").sign(b"statement");
    let confirms =
        |tenant, statement: &[u8]| signer(tenant).verifier().confirms(statement, &signature);
    assert!(confirms("alice", b"statement"));
    assert!(!confirms("alice", b"statement."));
    assert!(!confirms("bob", b"statement"));
    // The boundary between tenant and statement is part of what is signed.
    assert!(!confirms("alices", b"tatement"));
    let other = Signer::read_or_make(&dir.path().join("other.pem"), "alice").unwrap();
    assert!(!other.verifier().confirms(b"statement", &signature));
}

#[test]
fn keys_that_cannot_be_used_are_refused_with_a_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key.pem");
    let missing = Signer::read(&path, "alice").unwrap_err();
    assert!(error_chain(&missing).contains("cannot read the key"), "{missing}");
    Signer::read_or_make(&path, "alice").unwrap();
    let private = Verifier::read(&path, "alice").unwrap_err().to_string();
    assert!(private.contains("-pubout"), "{private}");
    let open = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    open(0o640);
    let exposed = Signer::read(&path, "alice").unwrap_err().to_string();
    assert!(exposed.contains("chmod 600"), "{exposed}");
    open(0o600);
    fs::write(&path, "not a key").unwrap();
    let other = Signer::read_or_make(&path, "alice").unwrap_err().to_string();
    assert!(other.contains("openssl genpkey"), "{other}");
}

/// RFC 8410, section 10.3.
const EXAMPLES: [&str; 2] = [
    "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC
-----END PRIVATE KEY-----
",
    "-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=
-----END PUBLIC KEY-----
",
];

#[test]
fn keys_have_the_format_of_the_standard() {
    let dir = tempfile::tempdir().unwrap();
    let [signing, public] = [dir.path().join("key.pem"), dir.path().join("key.pub")];
    fs::write(&signing, EXAMPLES[0]).unwrap();
    fs::set_permissions(&signing, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&public, EXAMPLES[1]).unwrap();
    let signer = Signer::read(&signing, "alice").unwrap();
    assert_eq!(signer.verifier(), Verifier::read(&public, "alice").unwrap());
}

/// Runs openssl, and returns whether it could be run.
fn openssl(arguments: &[&str]) -> bool {
    match Command::new("openssl").args(arguments).output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        output => {
            let output = output.unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            true
        }
    }
}

#[test]
fn keys_of_openssl_are_used_and_openssl_uses_those_that_are_made() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (theirs, ours, public) = (path("theirs.pem"), path("ours.pem"), path("public.pem"));
    if !openssl(&["genpkey", "-algorithm", "ed25519", "-out", &theirs]) {
        return;
    }
    Signer::read_or_make(Path::new(&ours), "alice").unwrap();
    for key in [theirs, ours] {
        openssl(&["pkey", "-in", &key, "-pubout", "-out", &public]);
        let signer = Signer::read(Path::new(&key), "alice").unwrap();
        assert_eq!(signer.verifier(), Verifier::read(Path::new(&public), "alice").unwrap());
    }
}
