//! The monitor: the process of one microVM. A process of firn starts it, and tells it what to do
//! over standard input. It is a program of its own because each microVM has one: it begins sooner
//! than a program with all of firn's commands, and takes less memory.
//!
//! The C library calls `main`: before its own, the standard library would read the bounds of this
//! thread's stack from /proc/self/maps, and then give each thread a second stack, for a message
//! that names the thread whose stack has overflowed. Without, such a thread ends the process by its
//! signal.

#![no_main]

use std::error::Error;
use std::ffi::c_int;
use std::io::Write;

use firn_base::{error_chain, ignore_broken_pipes};
use firn_run::{jail, monitor};

const SUCCESS: c_int = 0;
const FAILURE: c_int = 1;

// SAFETY: no other symbol has this name: the standard library has none in a program without its
// `main`.
#[unsafe(no_mangle)]
extern "C" fn main() -> c_int {
    match prepare() {
        // The process that started this one has the error.
        Ok(()) if monitor::serve().is_err() => FAILURE,
        Ok(()) => SUCCESS,
        Err(error) => {
            // What started it reads that, too.
            let _ = writeln!(std::io::stderr(), "firn: error: {}", error_chain(&*error));
            FAILURE
        }
    }
}

fn prepare() -> Result<(), Box<dyn Error>> {
    ignore_broken_pipes()?;
    firn_memory::sigbus::install()?;
    // SAFETY: this process has opened nothing yet.
    Ok(unsafe { jail::close_inherited() }?)
}
