//! `firn-agent`: the first process of a microVM.
//!
//! It runs as `/init` of the initramfs: sets the machine up, switches to the root file system and
//! serves requests over vsock from a child process, while it collects orphans itself.

mod init;

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use firn_agent::protocol::AGENT_PORT;
use firn_agent::serve::{Guest, RuntimeConfig, Server};
use rustix::time::{ClockId, clock_gettime};
use vsock::{VMADDR_CID_ANY, VsockListener};

/// The user that functions run as: none of the root file system's own.
const FUNCTION_USER: u32 = 1000;

fn main() -> ExitCode {
    if !rustix::process::getpid().is_init() {
        console("this is the first process of a microVM and does nothing anywhere else");
        return ExitCode::from(2);
    }
    if let Err(error) = init::set_up() {
        return give_up(&error);
    }
    match init::fork() {
        Ok(init::Side::Child) => match serve() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => give_up(&error),
        },
        Ok(init::Side::Parent(server)) => {
            let end = init::reap_until(server);
            console(format_args!("the server ended: {end}"));
            ExitCode::FAILURE
        }
        Err(error) => give_up(&error),
    }
}

/// Serves until the machine is powered off.
fn serve() -> io::Result<()> {
    let config = RuntimeConfig {
        python: "/usr/bin/python3".into(),
        task_dir: "/var/task".into(),
        user: Some(FUNCTION_USER),
    };
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, AGENT_PORT)?;
    let uptime = clock_gettime(ClockId::Boottime);
    console(format_args!("ready {}.{:03}", uptime.tv_sec, uptime.tv_nsec / 1_000_000));
    let server = Arc::new(Server::new(config, Box::new(Guest)));
    server.serve(listener.incoming());
    Ok(())
}

/// Says why on the console and ends the first process: the kernel panics then, which a monitor can
/// tell from a machine that was asked to power off.
fn give_up(error: &dyn std::error::Error) -> ExitCode {
    let mut reason = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        reason = format!("{reason}: {error}");
        cause = error.source();
    }
    console(reason);
    ExitCode::FAILURE
}

fn console(line: impl Display) {
    // Where the console is gone there is nobody left to tell.
    let _ = writeln!(io::stderr(), "firn-agent: {line}");
}
