use std::path::Path;

use super::{KvmError, Virtualization, open};

#[test]
fn hardware_virtualisation_needs_the_whole_flag() {
    let of = |cpuinfo: &str| Virtualization::from_cpuinfo(cpuinfo.as_bytes()).unwrap();
    assert_eq!(of("processor\t: 0\nflags\t\t: fpu svm sse\n"), Virtualization::Hardware);
    assert_eq!(of("flags\t\t: fpu vmx\n"), Virtualization::Hardware);
    assert_eq!(of("flags\t\t: fpu svm_lock\nbugs\t: vmx\n"), Virtualization::Software);
    assert_eq!(of(""), Virtualization::Software);
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
