//! `firn monitor`: a monitor that another process of firn started, and tells what to do. It is not
//! among the commands of `firn --help`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use firn_vmm::KVM_DEVICE;

/// Run a microVM for the process that started this one, which sends the request over standard input
#[derive(Debug, Parser)]
pub(crate) struct MonitorArgs {
    /// The KVM device
    #[arg(long, value_name = "DEVICE", default_value = KVM_DEVICE)]
    kvm: PathBuf,
}

pub(crate) fn run(arguments: &MonitorArgs) -> ExitCode {
    match firn_run::monitor::serve(&arguments.kvm) {
        Ok(()) => ExitCode::SUCCESS,
        // The process that started this one has the error.
        Err(_) => ExitCode::FAILURE,
    }
}
