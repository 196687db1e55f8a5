use super::*;

/// What a program answers to a call, and after how many instructions.
fn answer(program: &BpfProgram, call: u32, arguments: [u32; 12]) -> (u32, usize) {
    const X86_64: u32 = 0xc000_003e;
    let (mut at, mut register, mut count) = (0, 0, 0);
    loop {
        let sock_filter { code, jt, jf, k } = program[at].clone();
        let condition = match code {
            LOAD => {
                register = match k {
                    0 => call,
                    4 => X86_64,
                    // The arguments' halves begin after the instruction pointer.
                    _ => arguments[(k as usize - 16) / 4],
                };
                None
            }
            JUMP => {
                at += k as usize;
                None
            }
            0x15 => Some(register == k),
            0x25 => Some(register > k),
            JUMP_IF_GREATER_OR_EQUAL => Some(register >= k),
            0x54 => {
                register &= k;
                None
            }
            0x06 => return (k, count + 1),
            _ => panic!("{code:#x}"),
        };
        let skipped = condition.map_or(0, |holds| if holds { jt } else { jf });
        (at, count) = (at + 1 + usize::from(skipped), count + 1);
    }
}

/// The kernel runs a filter for every number of a call when it is applied, so what it runs counts.
#[test]
fn a_filter_by_halves_answers_as_its_rules_do_and_is_short() {
    for make in [allowed, denied, failing] {
        let (trap, allow) = (SeccompAction::Trap, SeccompAction::Allow);
        let halves = compile(make().unwrap(), trap.clone(), allow.clone()).unwrap();
        let whole = SeccompFilter::new(make().unwrap(), trap, allow, TargetArch::x86_64).unwrap();
        let whole: BpfProgram = whole.try_into().unwrap();
        assert!(whole.len() < 640, "{}", whole.len());
        assert!(halves.len() < 800, "{}", halves.len());
        let mut most = 0;
        for call in 0..600 {
            for value in [0, 1, 2, 3, 4, 5, 0x22, 0x1000, 0xae80, 0xae01, 0xaa00, u32::MAX] {
                let arguments = [value; 12];
                let (found, count) = answer(&halves, call, arguments);
                assert_eq!(found, answer(&whole, call, arguments).0, "{call} {value:#x}");
                most = most.max(count);
            }
        }
        assert!(most < 50, "{most}");
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
