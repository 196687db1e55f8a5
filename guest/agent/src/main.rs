//! `firn-agent`: the first process of a microVM.
//!
//! It runs as `/init` of the initramfs, sets the machine up and switches to the root file system. A
//! child process serves requests over vsock, while the first process reaps orphans.

mod init;

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::Path;
use std::process::ExitCode;

use firn_agent::protocol::AGENT_PORT;
use firn_agent::serve::{Freezer, Guest, RuntimeConfig, Server};
use rustix::system::{RebootCommand, reboot};
use rustix::time::{ClockId, clock_gettime};
use vsock::{VMADDR_CID_ANY, VsockListener};

/// The user id of functions, which the root file system does not use.
const FUNCTION_USER: u32 = 1000;

/// The address of the Runtime API, as on AWS Lambda.
const RUNTIME_API: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9001));

fn main() -> ExitCode {
    if !rustix::process::getpid().is_init() {
        console("firn-agent only runs as the first process of a microVM");
        return ExitCode::from(2);
    }
    if let Err(error) = init::set_up() {
        return fail(explain(&error));
    }
    match init::fork() {
        Ok(init::Side::Child) => match serve() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                console(format_args!("cannot serve on vsock port {AGENT_PORT}: {error}"));
                ExitCode::FAILURE
            }
        },
        Ok(init::Side::Parent(server)) => {
            let end = init::reap_until(server);
            fail(format_args!("the server ended: {end}"))
        }
        Err(error) => fail(format_args!("cannot start the server: {error}")),
    }
}

/// Serves until the machine is powered off.
fn serve() -> io::Result<()> {
    let config = RuntimeConfig {
        python: "/usr/bin/python3".into(),
        task_dir: "/var/task".into(),
        layers_dir: "/opt".into(),
        runtime_dir: "/var/runtime".into(),
        runtime_api: RUNTIME_API,
        user: Some(FUNCTION_USER),
        counters: "/proc/vmstat".into(),
        min_ttl_ms: "/sys/kernel/mm/lru_gen/min_ttl_ms".into(),
        freezer: Some(Freezer::new(Path::new("/sys/fs/cgroup/function"))?),
    };
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, AGENT_PORT)?;
    let uptime = clock_gettime(ClockId::Boottime);
    console(format_args!("ready {}.{:03}", uptime.tv_sec, uptime.tv_nsec / 1_000_000));
    let server = Server::new(config, Box::new(Guest::new()?));
    server.serve(listener.incoming());
    Ok(())
}

/// Prints the reason on the console and restarts the machine. The monitor then exits and can
/// distinguish the failure from a requested power-off.
fn fail(reason: impl Display) -> ExitCode {
    console(reason);
    if let Err(error) = reboot(RebootCommand::Restart) {
        console(format_args!("cannot restart: {error}"));
    }
    // The kernel panics when the first process exits.
    ExitCode::FAILURE
}

/// The text of an error and its causes.
fn explain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn console(line: impl Display) {
    // Without a console there is no way to report an error.
    let _ = writeln!(io::stderr(), "firn-agent: {line}");
}
