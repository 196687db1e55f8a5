use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::{ClaimError, FindError, Instances};

#[test]
fn a_name_is_in_use_until_its_owner_drops_it_and_no_file_remains() {
    let dir = tempfile::tempdir().unwrap();
    let instances = Instances::in_directory(dir.path().join("run"));
    let first = instances.claim("hello").unwrap();
    assert!(matches!(instances.claim("hello"), Err(ClaimError::Taken(name)) if name == "hello"));
    assert_eq!(instances.find("hello").unwrap().control_socket(), first.control_socket());
    drop(first);
    assert!(matches!(instances.find("hello"), Err(FindError::Unknown { .. })));
    assert_eq!(fs::read_dir(dir.path().join("run")).unwrap().count(), 0);
    instances.claim("hello").unwrap();
}

#[test]
fn files_of_a_killed_owner_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let instances = Instances::in_directory(dir.path().to_owned());
    for name in ["one", "two"] {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("lock"), "").unwrap();
        fs::write(dir.path().join(name).join("control.sock"), "").unwrap();
    }
    let one = instances.claim("one").unwrap();
    assert!(!one.control_socket().exists());
    let running: Vec<_> =
        instances.running().unwrap().iter().map(|i| i.name().to_owned()).collect();
    assert_eq!(running, ["one"]);
    assert!(!dir.path().join("two").exists());
}

#[test]
fn the_error_for_an_unknown_name_lists_the_running_names() {
    let dir = tempfile::tempdir().unwrap();
    let instances = Instances::in_directory(dir.path().to_owned());
    let error = instances.find("x").unwrap_err();
    assert_eq!(error.to_string(), "no microVM named x is running; none is");
    let _a = instances.claim("a").unwrap();
    let _b = instances.claim("b").unwrap();
    let error = instances.find("x").unwrap_err();
    assert_eq!(error.to_string(), "no microVM named x is running; running are a, b");
}

#[test]
fn names_that_are_not_host_names_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let instances = Instances::in_directory(dir.path().to_owned());
    let long = "x".repeat(64);
    for name in ["", "-a", "a-", "A", "a/b", "..", "a b", long.as_str()] {
        assert!(matches!(instances.claim(name), Err(ClaimError::Name(_))), "{name}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_directory_that_other_users_can_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let instances = Instances::in_directory(dir.path().to_owned());
    let error = instances.claim("hello").unwrap_err();
    assert!(matches!(error, ClaimError::Directory { .. }), "{error:?}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_symbolic_link_in_place_of_the_run_folder_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (elsewhere, link) = (dir.path().join("elsewhere"), dir.path().join("run"));
    // It looks like the folder of a microVM that was killed.
    fs::create_dir_all(elsewhere.join("mine")).unwrap();
    fs::write(elsewhere.join("mine/lock"), "kept").unwrap();
    symlink(&elsewhere, &link).unwrap();
    let instances = Instances::in_directory(link);
    let error = instances.claim("hello").unwrap_err();
    let ClaimError::Directory { source, .. } = &error else { panic!("{error:?}") };
    assert!(source.to_string().contains("symbolic link"), "{source}");
    assert!(matches!(instances.running(), Err(FindError::Directory { .. })));
    assert!(matches!(instances.find("mine"), Err(FindError::Directory { .. })));
    assert_eq!(fs::read_to_string(elsewhere.join("mine/lock")).unwrap(), "kept");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 1);
}

#[test]
fn symbolic_links_in_the_run_folder_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (elsewhere, run) = (dir.path().join("elsewhere"), dir.path().join("run"));
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("lock"), "kept").unwrap();
    fs::write(elsewhere.join("control.sock"), "kept").unwrap();
    let instances = Instances::in_directory(run.clone());
    drop(instances.claim("first").unwrap());
    symlink(&elsewhere, run.join("hello")).unwrap();
    let error = instances.claim("hello").unwrap_err();
    let ClaimError::Directory { source, .. } = &error else { panic!("{error:?}") };
    assert!(source.to_string().contains("symbolic link"), "{source}");
    // The lock alone is a link: to a file, and to one that would be created.
    for (name, target) in [("file", "control.sock"), ("none", "new")] {
        fs::create_dir(run.join(name)).unwrap();
        symlink(elsewhere.join(target), run.join(name).join("lock")).unwrap();
        let error = instances.claim(name).unwrap_err();
        assert!(matches!(error, ClaimError::Directory { .. }), "{error:?}");
    }
    assert!(instances.running().unwrap().is_empty());
    assert_eq!(fs::read_to_string(elsewhere.join("control.sock")).unwrap(), "kept");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 2);
}

#[test]
fn the_directory_of_a_running_owner_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let instances = Instances::in_directory(dir.path().to_owned());
    let (owners, claims) = (AtomicU32::new(0), AtomicU32::new(0));
    let over = AtomicBool::new(false);
    let claim = || {
        let owned = match instances.claim("name") {
            Ok(owned) => owned,
            Err(ClaimError::Taken(_)) => return,
            Err(error) => panic!("{error:?}"),
        };
        assert_eq!(owners.fetch_add(1, Ordering::SeqCst), 0);
        claims.fetch_add(1, Ordering::SeqCst);
        fs::write(owned.control_socket(), "").unwrap();
        for _ in 0..10 {
            std::thread::yield_now();
        }
        assert!(owned.control_socket().exists());
        owners.fetch_sub(1, Ordering::SeqCst);
        drop(owned);
        // A killed owner leaves its directory behind. Create it unless it exists already.
        if fs::create_dir(dir.path().join("name")).is_ok() {
            let _ = fs::write(dir.path().join("name/lock"), "");
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    instances.running().unwrap();
                }
            });
        }
        let claimers = [(); 2].map(|()| scope.spawn(|| (0..300).for_each(|_| claim())));
        let ended = claimers.map(std::thread::ScopedJoinHandle::join);
        over.store(true, Ordering::SeqCst);
        assert!(ended.iter().all(Result::is_ok));
    });
    assert!(claims.load(Ordering::SeqCst) > 0);
    assert!(instances.running().unwrap().is_empty());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
