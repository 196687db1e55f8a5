use std::io::Read;

use super::*;
use crate::jail::tests::group_v2;

fn sh(script: &str) -> Program {
    let null = || File::options().read(true).write(true).open("/dev/null").unwrap().into();
    program("/bin/sh", null).arg("-c").unwrap().arg(script).unwrap()
}

fn program(path: &str, file: impl Fn() -> OwnedFd) -> Program {
    Program::new(path.as_ref(), file(), file()).unwrap()
}

/// What a process writes to standard error, and its end.
fn end(mut process: Process) -> (String, ExitStatus) {
    let mut text = String::new();
    process.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    (text, process.wait().unwrap())
}

#[test]
fn a_process_is_in_its_group_from_the_beginning() {
    let Some((group, open)) = group_v2("begin") else { return };
    let name = group.path().file_name().unwrap().to_str().unwrap().to_owned();
    let script = "cat /proc/self/cgroup >&2; env >&2; ps -o pgid= -p $$ >&2; exit 7";
    let process = sh(script).spawn(Some(open.as_fd())).unwrap();
    let pid = process.id();
    let (text, status) = end(process);
    assert_eq!(status.code(), Some(7), "{text}");
    assert!(text.lines().any(|line| line.starts_with("0::") && line.ends_with(&name)), "{text}");
    assert!(text.lines().any(|line| line.trim() == pid.to_string()), "{text}");
    assert!(!text.contains("CARGO"), "{text}");
}

#[test]
fn a_program_that_is_not_there_is_an_error_and_leaves_no_process() {
    let Some((group, open)) = group_v2("none") else { return };
    let null = || File::options().read(true).write(true).open("/dev/null").unwrap().into();
    for group in [Some(open.as_fd()), None] {
        let error = program("/none/such", null).spawn(group).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
    }
    assert_eq!(group.read("cgroup.procs").unwrap(), "");
}

#[test]
fn signals_are_as_they_were_and_a_child_can_be_killed() {
    let Some((_group, open)) = group_v2("signals") else { return };
    let before = blocked();
    for group in [Some(open.as_fd()), None] {
        let script = "grep SigBlk /proc/self/status >&2; exec sleep 60";
        let mut process = sh(script).spawn(group).unwrap();
        let mut line = [0; 64];
        let len = process.stderr.as_mut().unwrap().read(&mut line).unwrap();
        let line = String::from_utf8_lossy(&line[..len]).into_owned();
        assert_eq!(line.split_whitespace().last(), Some(&*before), "{line}");
        assert_eq!(process.try_wait().unwrap(), None);
        process.kill().unwrap();
        assert_eq!(process.wait().unwrap().signal(), Some(libc::SIGKILL));
        assert!(process.kill().is_ok() && process.try_wait().unwrap().is_some());
    }
    assert_eq!(blocked(), before);
}

/// The signals that this thread blocks.
fn blocked() -> String {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("SigBlk")).unwrap();
    line.split_whitespace().last().unwrap().to_owned()
}
