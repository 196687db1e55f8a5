//! The monitor: the process of one microVM. A process of firn starts it, and tells it what to do
//! over standard input. It is a program of its own because each microVM has one: it begins sooner
//! than a program with all of firn's commands, and takes less memory.

use std::process::ExitCode;

use firn_run::{jail, monitor};

fn main() -> ExitCode {
    if firn_memory::sigbus::install().is_err() {
        return ExitCode::FAILURE;
    }
    // SAFETY: this process has opened nothing yet.
    let closed = unsafe { jail::close_inherited() };
    match closed.and_then(|()| monitor::serve()) {
        Ok(()) => ExitCode::SUCCESS,
        // The process that started this one has the error.
        Err(_) => ExitCode::FAILURE,
    }
}
