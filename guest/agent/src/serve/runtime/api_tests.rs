use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

/// The next call, waited for as the agent does.
fn wait(calls: &Calls) -> Option<Call> {
    let timeout = Timespec::try_from(Duration::from_secs(10)).unwrap();
    loop {
        if let Some(call) = calls.take() {
            return Some(call);
        }
        let mut event = [PollFd::from_borrowed_fd(calls.event(), PollFlags::IN)];
        if poll(&mut event, Some(&timeout)).unwrap() == 0 {
            return None;
        }
    }
}

#[test]
fn a_call_that_arrives_while_another_is_looked_for_wakes_the_agent() {
    let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap());
    let (sender, receiver) = channel();
    let runtime = Connection { calls: sender, event: Arc::clone(&event) };
    let calls = Calls { calls: receiver, event };
    let (taken, sent) = channel();
    let count = 20_000;
    let runtime = std::thread::spawn(move || {
        for _ in 0..count {
            runtime.send(Call { kind: CallKind::Next, reply: oneshot::channel().0 });
            sent.recv().unwrap();
        }
    });
    for number in 0..count {
        assert!(wait(&calls).is_some(), "call {number} was sent, and does not wake the agent");
        taken.send(()).unwrap();
    }
    runtime.join().unwrap();
}
