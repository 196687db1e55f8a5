use firn_memory::trace::Access;

use super::{LoadTraceError, load, names};

#[test]
fn made_up_traces_touch_every_page_once_in_order() {
    for (name, access) in
        [("sequential-read:16M", Access::Read), ("sequential-write:16384K", Access::Write)]
    {
        let loaded = load(name).unwrap();
        assert_eq!(loaded.name, name);
        assert_eq!(loaded.trace.zero_map().count(), 0);
        let touches = loaded.trace.touches();
        assert!(touches.iter().all(|touch| touch.access == access && touch.gap == 0));
        assert!(touches.iter().map(|touch| touch.page).eq(0..4096));
    }
}

#[test]
fn every_trace_that_is_carried_can_be_loaded() {
    for name in names().filter(|name| !name.ends_with(":SIZE")) {
        assert_eq!(load(&name).unwrap().name, name);
    }
}

#[test]
fn a_file_is_loaded_by_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("some.trace");
    let trace = load("sequential-read:1M").unwrap().trace;
    std::fs::write(&path, trace.encode().unwrap()).unwrap();
    let loaded = load(path.to_str().unwrap()).unwrap();
    assert_eq!((loaded.name.as_str(), loaded.trace), ("some", trace));
    std::fs::write(&path, b"FIRN").unwrap();
    assert!(matches!(load(path.to_str().unwrap()), Err(LoadTraceError::Decode { .. })));
}

#[test]
fn what_is_no_trace_is_refused_with_the_names_that_are() {
    let error = load("pyaess").unwrap_err();
    assert!(error.to_string().contains("sequential-read:SIZE"), "{error}");
    assert!(matches!(load("missing.trace"), Err(LoadTraceError::Read { .. })));
    for size in ["", "M", "64T", "-1", "99999999999999999999", "18446744073709551615G"] {
        let name = format!("sequential-read:{size}");
        assert!(matches!(load(&name), Err(LoadTraceError::Size(_))), "{size}");
    }
    assert!(matches!(load("sequential-read:1"), Err(LoadTraceError::Layout { .. })));
}
