use std::os::unix::net::UnixStream;
use std::os::unix::thread::JoinHandleExt;

use super::super::{Request, Response};
use super::{MAX_REQUEST, MAX_RESPONSE, receive, receive_with_descriptor, send};

extern "C" fn nothing(_: libc::c_int) {}

/// Installs a handler that does nothing for a signal that interrupts system calls.
fn interrupting() -> libc::c_int {
    let signal = libc::SIGRTMIN() + 3;
    // SAFETY: an all-zero action is valid and empty.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as usize;
    // SAFETY: the handler does nothing. Without SA_RESTART, interrupted system calls fail with
    // EINTR.
    assert_eq!(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }, 0);
    signal
}

/// Runs `wait` in a thread that is interrupted repeatedly, then ends its wait with `go_on`.
fn interrupted<T: Send + 'static>(
    wait: impl FnOnce() -> T + Send + 'static,
    go_on: impl FnOnce(),
) -> T {
    let signal = interrupting();
    let thread = std::thread::spawn(wait);
    for _ in 0..50 {
        // SAFETY: the thread has not been joined.
        unsafe { libc::pthread_kill(thread.as_pthread_t(), signal) };
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    go_on();
    thread.join().unwrap()
}

#[test]
fn signals_do_not_break_connections() {
    let (near, far) = UnixStream::pair().unwrap();
    let request = interrupted(
        move || (receive::<Request>(&far, MAX_REQUEST).unwrap(), far),
        || send(&near, &Request::List, None).unwrap(),
    );
    assert_eq!(request.0, Request::List);
    let far = request.1;
    let (answer, descriptor) = interrupted(
        move || receive_with_descriptor::<Response>(&near, MAX_RESPONSE).unwrap(),
        || send(&far, &Response::Noted, Some(&far.try_clone().unwrap().into())).unwrap(),
    );
    assert_eq!(answer, Response::Noted);
    assert!(descriptor.is_some());
}
