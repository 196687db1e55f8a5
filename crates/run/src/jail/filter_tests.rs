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

/// The kernel translates a filter, and runs it for every number of a call when it is applied, so
/// its length counts, and what it runs.
#[test]
fn a_filter_by_halves_answers_as_its_rules_do_and_is_short() {
    let (trap, allow) = (SeccompAction::Trap, SeccompAction::Allow);
    for (make, otherwise, length) in [
        (first as fn() -> Result<Vec<Group>>, trap.clone(), 420),
        (opening, trap, 500),
        (second, allow, 50),
    ] {
        let halves = compile(make().unwrap(), otherwise.clone()).unwrap();
        assert!(halves.len() < length, "{}", halves.len());
        let whole = |Group { rules, matched, not_matched }| {
            let calls: Vec<u32> = rules.keys().map(|call| (*call).try_into().unwrap()).collect();
            let filter = SeccompFilter::new(rules, not_matched, matched, TargetArch::x86_64);
            let program: BpfProgram = filter.unwrap().try_into().unwrap();
            (calls, program)
        };
        let wholes: Vec<_> = make().unwrap().into_iter().map(whole).collect();
        let mut most = 0;
        for call in (0..600).chain([0x4000_0000, 0x4000_0001, u32::MAX]) {
            let whole = wholes.iter().find(|(calls, _)| calls.contains(&call));
            for value in [0, 1, 2, 3, 4, 5, 0x22, 0x1000, 0xae80, 0xae01, 0xaa00, u32::MAX] {
                let arguments = [value; 12];
                let (found, count) = answer(&halves, call, arguments);
                let expected = whole.map_or_else(
                    || u32::from(otherwise.clone()),
                    |(_, program)| answer(program, call, arguments).0,
                );
                assert_eq!(found, expected, "{call} {value:#x}");
                most = most.max(count);
            }
        }
        assert!(most < 50, "{most}");
    }
}

#[test]
fn no_call_that_is_allowed_names_a_file_or_a_process() {
    let [allowed, opening] = [first, opening].map(|make| make().unwrap().remove(0).rules);
    for call in [
        libc::SYS_open,
        libc::SYS_openat,
        libc::SYS_openat2,
        libc::SYS_socket,
        libc::SYS_connect,
        libc::SYS_bind,
        libc::SYS_userfaultfd,
    ] {
        assert!(!allowed.contains_key(&call) && opening.contains_key(&call), "{call}");
    }
    for call in [
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
        libc::SYS_keyctl,
        libc::SYS_chroot,
        libc::SYS_mknodat,
        libc::SYS_setuid,
    ] {
        assert!(!allowed.contains_key(&call) && !opening.contains_key(&call), "{call}");
    }
}
