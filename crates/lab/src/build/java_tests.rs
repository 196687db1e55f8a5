use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::make_links_relative;

#[test]
fn absolute_links_become_relative_ones_to_the_same_files() {
    let root = tempfile::tempdir().unwrap();
    let conf = root.path().join("usr/lib/jvm/java/conf");
    fs::create_dir_all(&conf).unwrap();
    fs::create_dir(root.path().join("etc")).unwrap();
    fs::write(root.path().join("etc/security"), "x").unwrap();
    symlink("/etc/security", conf.join("absolute")).unwrap();
    symlink("absolute", conf.join("relative")).unwrap();
    make_links_relative(&root.path().join("usr/lib/jvm"), root.path()).unwrap();
    let target = fs::read_link(conf.join("absolute")).unwrap();
    assert_eq!(target, Path::new("../../../../../etc/security"));
    assert_eq!(fs::read_to_string(conf.join("relative")).unwrap(), "x");
}
