//! The monitor: the process of one microVM. A process of firn starts it, and tells it what to do
//! over standard input. It is a program of its own because each microVM has one: it begins sooner
//! than a program with all of firn's commands, and takes less memory.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use firn_base::error_chain;
use firn_run::{jail, monitor};

fn main() -> ExitCode {
    match prepare() {
        // The process that started this one has the error.
        Ok(()) if monitor::serve().is_err() => ExitCode::FAILURE,
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // What started it reads that, too.
            let _ = writeln!(std::io::stderr(), "firn: error: {}", error_chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn prepare() -> Result<(), Box<dyn Error>> {
    firn_memory::sigbus::install()?;
    // SAFETY: this process has opened nothing yet.
    Ok(unsafe { jail::close_inherited() }?)
}
