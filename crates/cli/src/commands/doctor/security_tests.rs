use super::*;

fn vulnerability_of(name: &str, text: &str, exposure: Exposure) -> Vulnerability {
    Vulnerability { name: name.to_owned(), text: text.to_owned(), exposure }
}

#[test]
fn a_vulnerable_processor_is_named_with_the_kernels_text_and_a_way_out() {
    let found = vulnerabilities(&[
        vulnerability_of("l1tf", "Not affected", Exposure::NotAffected),
        vulnerability_of("mds", "Mitigation: x; SMT vulnerable", Exposure::VulnerableThreads),
        vulnerability_of("retbleed", "Mitigation: IBPB", Exposure::Mitigated),
        vulnerability_of("spec_store_bypass", "Vulnerable", Exposure::Vulnerable),
        vulnerability_of("srbds", "Unknown: Dependent on hypervisor", Exposure::Unknown),
        vulnerability_of("tsa", "Not affected", Exposure::NotAffected),
    ]);
    let rows: Vec<_> = found
        .iter()
        .map(|row| (&*row.what, &*row.found, row.good, row.remedy.as_deref()))
        .collect();
    assert_eq!(
        rows,
        [
            ("mds", "Mitigation: x; SMT vulnerable", false, Some(SMT_REMEDY)),
            ("retbleed", "Mitigation: IBPB", true, None),
            ("spec_store_bypass", "Vulnerable", false, Some(UPDATE)),
            ("srbds", "Unknown: Dependent on hypervisor", false, Some(OF_HYPERVISOR)),
            ("other vulnerabilities", "not affected by l1tf, tsa", true, None),
        ]
    );
    assert!(!vulnerabilities(&[])[0].good);
}

#[test]
fn what_tenants_can_see_of_each_other_is_a_warning() {
    assert!(!smt(Some(Smt::On)).good && !smt(None).good);
    assert!(smt(Some(Smt::Off)).good && smt(Some(Smt::Absent)).good);
    assert!(!ksm(Ksm::OfThisProcess).good);
    assert!(ksm(Ksm::OfOthers).good && ksm(Ksm::Off).good && ksm(Ksm::Absent).good);
}

#[test]
fn walls_that_the_kernel_lacks_are_a_warning() {
    assert!(landlock(Some(6)).good && landlock(Some(7)).good);
    assert!(!landlock(None).good);
    let old = landlock(Some(3));
    assert!(!old.good && old.found.contains("TCP"), "{old:?}");
    assert!(!landlock(Some(5)).found.contains("TCP"));
    assert!(seccomp(true).good && !seccomp(false).good);
    let limited = user_namespaces(UserNamespaces::Root("/proc/sys/kernel/x"));
    assert!(limited.remedy.unwrap().contains("/proc/sys/kernel/x"));
    assert!(!user_namespaces(UserNamespaces::None).good);
    assert!(userfaultfd(true).good && !userfaultfd(false).good);
}
