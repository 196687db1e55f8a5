use super::*;

/// The number of rules of each filter is what the kernel runs at each call: `BPF_MAXINSNS` is 4096.
#[test]
fn filters_can_be_made_and_are_small() {
    for rules in [allowed(), denied(), failing()] {
        let filter = SeccompFilter::new(
            rules.unwrap(),
            SeccompAction::Trap,
            SeccompAction::Allow,
            TargetArch::x86_64,
        );
        let program: BpfProgram = filter.unwrap().try_into().unwrap();
        assert!(program.len() < 640, "{}", program.len());
    }
}

#[test]
fn no_call_that_is_allowed_names_a_file_or_a_process() {
    let allowed = allowed().unwrap();
    for call in [
        libc::SYS_open,
        libc::SYS_openat,
        libc::SYS_openat2,
        libc::SYS_socket,
        libc::SYS_connect,
        libc::SYS_bind,
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_fork,
        libc::SYS_vfork,
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_pidfd_open,
        libc::SYS_pidfd_getfd,
        libc::SYS_kill,
        libc::SYS_tkill,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_mount,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_io_uring_setup,
        libc::SYS_userfaultfd,
        libc::SYS_keyctl,
    ] {
        assert!(!allowed.contains_key(&call), "{call}");
    }
}
