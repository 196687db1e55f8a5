use super::*;
use crate::cgroup::{Cgroup, CgroupPlace, Controller};

/// A group of version 2, which has devices and processes on hosts with and without controllers, and
/// its open directory.
pub(super) fn group_v2(name: &str) -> Option<(Cgroup, File)> {
    let (places, _) = CgroupPlace::find_all(&[Controller { v1: "none", v2: None }]).unwrap();
    let name = format!("firn-test-{name}-{}", std::process::id());
    let group = places.first().and_then(|place| place.create(&name).ok());
    firn_required::has("cgroup2", group.is_some()).then(|| {
        let group = group.unwrap();
        let open = File::open(group.path()).unwrap();
        (group, open)
    })
}

#[test]
fn modes_are_read_as_they_are_written() {
    for mode in [JailMode::Auto, JailMode::Require, JailMode::Off] {
        assert_eq!(mode.to_string().parse::<JailMode>().unwrap(), mode);
    }
    assert!("on".parse::<JailMode>().unwrap_err().to_string().contains("\"on\" is not auto"));
}

#[test]
fn a_jail_that_is_off_has_no_walls() {
    assert_eq!(enter(JailMode::Off, None, || ()).unwrap(), None);
    assert!(Jail::new(JailMode::Off).shared().is_none());
}
