use super::*;

const FILE: &str = "# keys\n\
    [default]\naws_access_key_id = AKIDEFAULT\naws_secret_access_key=one=1\n\
    [arn:aws:iam::000000000000:role/shop]\n\
    aws_access_key_id=AKIDSHOP\naws_secret_access_key=two\naws_session_token = three\n\
    [half]\naws_access_key_id=AKIDHALF\n";

fn roles(text: &str) -> (tempfile::TempDir, Result<Roles, RolesError>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("roles");
    std::fs::write(&path, text).unwrap();
    (folder, Roles::open(&path))
}

#[test]
fn a_role_has_the_keys_of_its_section_or_the_default_ones() {
    let (folder, roles) = roles(FILE);
    let roles = roles.unwrap();
    let keys = |role: &str| roles.of(role).unwrap();
    let shop = keys("arn:aws:iam::000000000000:role/shop").unwrap();
    let texts = [&shop.access_key_id, &shop.secret_access_key, &shop.session_token];
    assert_eq!(texts, ["AKIDSHOP", "two", "three"]);
    assert_eq!(keys("half").unwrap().secret_access_key, "one=1");
    let changed = FILE.replace("one=1", "four");
    std::fs::write(folder.path().join("roles"), changed).unwrap();
    assert_eq!(keys("other").unwrap().secret_access_key, "four", "the file is read again");
}

#[test]
fn a_role_without_keys_has_none() {
    let (_folder, roles) = roles(&FILE.replace("[default]", "[another]"));
    assert!(roles.unwrap().of("arn:any").unwrap().is_none());
}

#[test]
fn a_file_without_keys_is_an_error() {
    let (_folder, empty) = roles("[default]\naws_access_key_id = AKID\n");
    assert!(matches!(empty, Err(RolesError::Empty { .. })), "{empty:?}");
    let missing = Roles::open(Path::new("/missing/roles"));
    assert!(matches!(missing, Err(RolesError::Read { .. })), "{missing:?}");
}
