//! `firn-agent`: the first process of a microVM.
//!
//! It runs as `/init` of the initramfs: sets the machine up, switches to the root file system and
//! serves requests over vsock from a child process, while it collects orphans itself.

mod init;

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::process::ExitCode;
use std::sync::Arc;

use firn_agent::protocol::AGENT_PORT;
use firn_agent::serve::{Guest, RuntimeConfig, Server};
use rustix::system::{RebootCommand, reboot};
use rustix::time::{ClockId, clock_gettime};
use vsock::{VMADDR_CID_ANY, VsockListener};

/// The user that functions run as: none of the root file system's own.
const FUNCTION_USER: u32 = 1000;

/// Where AWS Lambda serves the Runtime API, too.
const RUNTIME_API: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9001));

fn main() -> ExitCode {
    if !rustix::process::getpid().is_init() {
        console("this is the first process of a microVM and does nothing anywhere else");
        return ExitCode::from(2);
    }
    if let Err(error) = init::set_up() {
        return give_up(explain(&error));
    }
    match init::fork() {
        Ok(init::Side::Child) => match serve() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                console(format_args!("cannot listen on vsock port {AGENT_PORT}: {error}"));
                ExitCode::FAILURE
            }
        },
        Ok(init::Side::Parent(server)) => {
            let end = init::reap_until(server);
            give_up(format_args!("the server ended: {end}"))
        }
        Err(error) => give_up(format_args!("cannot start the server: {error}")),
    }
}

/// Serves until the machine is powered off.
fn serve() -> io::Result<()> {
    let config = RuntimeConfig {
        python: "/usr/bin/python3".into(),
        task_dir: "/var/task".into(),
        runtime_dir: "/var/runtime".into(),
        runtime_api: RUNTIME_API,
        user: Some(FUNCTION_USER),
    };
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, AGENT_PORT)?;
    let uptime = clock_gettime(ClockId::Boottime);
    console(format_args!("ready {}.{:03}", uptime.tv_sec, uptime.tv_nsec / 1_000_000));
    let server = Arc::new(Server::new(config, Box::new(Guest)));
    server.serve(listener.incoming());
    Ok(())
}

/// Says why on the console and restarts the machine, which ends the monitor and tells it apart from
/// a machine that was asked to power off.
fn give_up(reason: impl Display) -> ExitCode {
    console(reason);
    if let Err(error) = reboot(RebootCommand::Restart) {
        console(format_args!("cannot restart: {error}"));
    }
    // The end of the first process makes the kernel panic.
    ExitCode::FAILURE
}

/// An error's text and those of its causes.
fn explain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn console(line: impl Display) {
    // Where the console is gone there is nobody left to tell.
    let _ = writeln!(io::stderr(), "firn-agent: {line}");
}
