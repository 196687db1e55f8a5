use super::{Host, has_virtualization};

#[test]
fn required_parts_are_the_ones_that_the_host_has() {
    let mut host = Host {
        kvm: false,
        hardware: false,
        disk: true,
        root: true,
        cgroup2: true,
        cpu_limits: true,
        tun: true,
    };
    assert_eq!(host.required(), "disk,root,cgroup2,cpu_limits,tun");
    host.kvm = true;
    assert_eq!(host.required(), "kvm,disk,root,cgroup2,cpu_limits,tun");
    host = Host {
        kvm: false,
        hardware: false,
        disk: false,
        root: false,
        cgroup2: false,
        cpu_limits: false,
        tun: false,
    };
    assert_eq!(host.required(), "");
}

#[test]
fn hardware_virtualization_is_a_whole_flag() {
    assert!(has_virtualization("flags\t: fpu svm lm\n"));
    assert!(has_virtualization("flags\t: fpu vmx"));
    assert!(!has_virtualization("flags\t: fpu svm_lock vmxx\n"));
}
