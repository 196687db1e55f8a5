use super::*;

#[test]
fn this_host_has_facts() {
    let facts = HostFacts::read().unwrap();
    assert!(!facts.kernel.is_empty());
    assert!(facts.memory_available > 0 && facts.memory_available <= facts.memory_total);
    assert!(facts.huge_page_sizes.is_sorted());
    assert!(facts.huge_page_sizes.iter().all(|size| size.is_power_of_two()));
}

#[test]
fn files_of_the_kernel_are_parsed() {
    let meminfo =
        "MemTotal:       24683956 kB\nMemFree:         100 kB\nHugePages_Total:       0\n";
    assert_eq!(kib_of(meminfo, "MemTotal"), Some(24_683_956));
    assert_eq!(kib_of(meminfo, "Mem"), None);
    assert_eq!(kib_of(meminfo, "HugePages_Total"), None);
    assert_eq!(huge_page_size("hugepages-2048kB"), Some(2 << 20));
    assert_eq!(huge_page_size("hugepages-1048576kB"), Some(1 << 30));
    assert_eq!(huge_page_size("hugepages-xkB"), None);

    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "always [madvise] never\n").unwrap();
    assert_eq!(chosen(file.path()).as_deref(), Some("madvise"));
    assert_eq!(chosen(&file.path().join("missing")), None);
}

#[test]
fn memory_is_about_the_same_without_proc() {
    let (total, available) = memory(&fs::read_to_string(MEMINFO).unwrap()).unwrap();
    let (same, free) = memory_without_proc();
    assert_eq!(total, same);
    assert!(free <= total && available <= total);
}
