use rustix::process::getpid;

use super::*;

#[test]
fn a_number_is_a_process_while_its_connection_is_open() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let process = by_number(&ours, getpid()).unwrap();
    assert!(!has(process, PollFlags::IN), "it lives");
    drop(theirs);
    let refused = by_number(&ours, getpid()).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::SRCH.raw_os_error()));
}
