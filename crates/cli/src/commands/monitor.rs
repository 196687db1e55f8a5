//! `firn monitor`: a monitor that another process of firn started, and tells what to do. It is not
//! among the commands of `firn --help`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use firn_run::jail::{JailMode, SharedPaths};

/// Run a microVM for the process that started this one, which sends the request over standard input
#[derive(Debug, Parser)]
pub(crate) struct MonitorArgs {
    /// The directory of the microVMs of the process that started this one. It tells people whose
    /// monitor this is
    #[arg(long, value_name = "DIR")]
    owner: Option<PathBuf>,
    /// Whether it enters the jail
    #[arg(long, value_name = "MODE", default_value_t)]
    jail: JailMode,
    /// The network namespace that it enters then
    #[arg(long, value_name = "FILE", requires = "root")]
    network: Option<PathBuf>,
    /// The mount namespace that it enters then
    #[arg(long, value_name = "FILE", requires = "network")]
    root: Option<PathBuf>,
}

pub(crate) fn run(arguments: &MonitorArgs) -> ExitCode {
    let (network, root) = (arguments.network.clone(), arguments.root.clone());
    let shared = network.zip(root).map(|(network, root)| SharedPaths { network, root });
    match firn_run::monitor::serve(arguments.jail, shared.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        // The process that started this one has the error.
        Err(_) => ExitCode::FAILURE,
    }
}
