use rustix::process::getpid;

use super::*;

#[test]
fn pid_identifies_the_process_while_its_connection_is_open() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let process = by_number(&ours, getpid()).unwrap();
    assert!(!has(process, PollFlags::IN), "the process runs");
    drop(theirs);
    let refused = by_number(&ours, getpid()).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::SRCH.raw_os_error()));
}
