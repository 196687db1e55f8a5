use std::path::Path;

use super::{KvmError, Virtualization, open};

#[test]
fn hardware_virtualisation_is_a_flag_of_the_kernel() {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap();
    let listed = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    assert_eq!(Virtualization::of_host() == Virtualization::Hardware, listed);
}

#[test]
fn a_missing_device_is_reported_with_a_remedy() {
    let error = open(Path::new("/nonexistent/kvm")).unwrap_err();
    assert!(matches!(error, KvmError::Missing(_)));
    assert!(error.to_string().contains("firn lab run"), "{error}");
}

#[test]
fn a_device_that_is_not_kvm_is_refused() {
    let error = open(Path::new("/dev/null")).unwrap_err();
    assert!(matches!(error, KvmError::Version { .. }), "{error:?}");
}
