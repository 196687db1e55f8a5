use super::*;

#[test]
fn parts_are_named_whole() {
    assert!(names("kvm,disk", "kvm") && names(",disk,", "disk"));
    assert!(!names("", "kvm") && !names("kvmm,", "kvm"));
}
