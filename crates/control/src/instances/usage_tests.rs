use super::*;

#[test]
fn memory_use_is_read_from_the_status_of_a_process() {
    let status = "Name:\tfirn\nVmPTE:\t     200 kB\nRssAnon:\t    1024 kB\nRssFile:\t    3000 kB\nRssShmem:\t       8 kB\n";
    let usage = Usage { private: 1224 << 10, shared: 3008 << 10 };
    assert_eq!(parse(status), Some(usage));
    assert_eq!(parse("Name:\tkthread\n"), None);
    let before = super::usage(std::process::id()).unwrap();
    let written = vec![1_u8; 64 << 20];
    let after = super::usage(std::process::id()).unwrap();
    assert!(after.private >= before.private + (60 << 20), "{before:?} {after:?} {}", written.len());
    assert_eq!(super::usage(u32::MAX), None);
}
