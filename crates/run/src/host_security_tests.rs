use super::*;

#[test]
fn this_host_is_examined_without_being_changed() {
    let facts = HostSecurity::read();
    assert_eq!(facts, HostSecurity::read());
    assert!(facts.vulnerabilities.is_sorted_by(|a, b| a.name < b.name));
    // The restriction of the thread that finds Landlock's version is not this thread's.
    std::process::Command::new("/bin/true").status().unwrap();
}

#[test]
fn smt_is_read_from_its_two_files() {
    assert_eq!(smt_of(Some("1\n"), Some("on\n")), Some(Smt::On));
    // Some of the cores are limited to one thread.
    assert_eq!(smt_of(Some("1\n"), Some("2\n")), Some(Smt::On));
    assert_eq!(smt_of(Some("1\n"), None), Some(Smt::On));
    assert_eq!(smt_of(Some("0\n"), Some("forceoff\n")), Some(Smt::Off));
    assert_eq!(smt_of(Some("0\n"), Some("notsupported\n")), Some(Smt::Absent));
    assert_eq!(smt_of(Some("0\n"), None), Some(Smt::Absent));
    assert_eq!(smt_of(Some("\n"), Some("on\n")), None);
    assert_eq!(smt_of(None, Some("on\n")), None);
}

#[test]
fn ksm_matters_where_this_process_is_merged() {
    let merged = "ksm_rmap_items 0\nksm_merge_any: yes\nksm_mergeable: no\n";
    let own = "ksm_rmap_items 0\nksm_merge_any: no\nksm_mergeable: no\n";
    assert_eq!(ksm_of(Some("1\n"), Some(merged)), Ksm::OfThisProcess);
    assert_eq!(ksm_of(Some("1\n"), Some(own)), Ksm::OfOthers);
    assert_eq!(ksm_of(Some("1\n"), None), Ksm::OfOthers);
    assert_eq!(ksm_of(Some("0\n"), Some(merged)), Ksm::Off);
    assert_eq!(ksm_of(Some("2\n"), Some(merged)), Ksm::Off);
    assert_eq!(ksm_of(None, Some(merged)), Ksm::Absent);
}

#[test]
fn texts_of_vulnerabilities_are_understood() {
    for (text, meaning) in [
        ("Not affected", Exposure::NotAffected),
        ("Mitigation: Retpolines; STIBP: disabled; BHI: Not affected", Exposure::Mitigated),
        ("KVM: Mitigation: VMX disabled", Exposure::Mitigated),
        ("Mitigation: Clear CPU buffers; SMT Host state unknown", Exposure::Mitigated),
        ("Mitigation: Clear CPU buffers; SMT vulnerable", Exposure::VulnerableThreads),
        (
            "Mitigation: PTE Inversion; VMX: conditional cache flushes, SMT vulnerable",
            Exposure::VulnerableThreads,
        ),
        ("Vulnerable", Exposure::Vulnerable),
        ("Vulnerable: Safe RET, no microcode", Exposure::Vulnerable),
        ("Vulnerable: Clear CPU buffers attempted, no microcode; SMT vulnerable", {
            Exposure::Vulnerable
        }),
        ("Mitigation: Enhanced IBRS; BHI: Vulnerable", Exposure::Vulnerable),
        ("KVM: Vulnerable", Exposure::Vulnerable),
        ("Unknown: Dependent on hypervisor status", Exposure::Unknown),
        ("", Exposure::Unknown),
    ] {
        assert_eq!(exposure(text), meaning, "{text}");
    }
}

#[test]
fn vulnerabilities_are_the_files_of_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("mds"), "Vulnerable\n").unwrap();
    fs::write(directory.path().join("l1tf"), "Not affected\n").unwrap();
    fs::write(directory.path().join("odd"), [0xff]).unwrap();
    let found = vulnerabilities(directory.path());
    let names: Vec<_> = found.iter().map(|found| (&*found.name, &*found.text)).collect();
    assert_eq!(names, [("l1tf", "Not affected"), ("mds", "Vulnerable")]);
    assert_eq!(vulnerabilities(&directory.path().join("missing")), []);
}

#[test]
fn filters_need_the_action_that_ends_a_process() {
    assert!(has_filters("kill_process kill_thread trap errno\n"));
    assert!(!has_filters("kill_thread trap errno\n"));
    assert!(!has_filters(""));
}

#[test]
fn switches_of_user_namespaces_are_found() {
    let [debian, ubuntu] = USER_NAMESPACE_SWITCHES.map(|(path, _)| path);
    let with = |files: &[(&str, &str)]| {
        let files: Vec<_> = files.iter().map(|&(path, text)| (path, text.to_owned())).collect();
        user_namespaces(move |path| {
            files.iter().find(|(known, _)| *known == path).map(|(_, text)| text.clone())
        })
    };
    assert_eq!(with(&[]), UserNamespaces::None);
    assert_eq!(with(&[(USER_NAMESPACES, "0\n")]), UserNamespaces::None);
    assert_eq!(with(&[(USER_NAMESPACES, "96365\n")]), UserNamespaces::All);
    let some = (USER_NAMESPACES, "96365\n");
    assert_eq!(with(&[some, (debian, "1\n"), (ubuntu, "0\n")]), UserNamespaces::All);
    assert_eq!(with(&[some, (debian, "0\n")]), UserNamespaces::Root(debian));
    assert_eq!(with(&[some, (ubuntu, "1\n")]), UserNamespaces::Root(ubuntu));
}
