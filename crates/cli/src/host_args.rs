//! What commands that run a microVM need of the host.

use std::io;
use std::path::PathBuf;

use clap::Args;
use thiserror::Error;

use firn_vmm::{KVM_DEVICE, Virtualization};

/// Options that every command with a microVM has.
#[derive(Debug, Clone, Args)]
pub(crate) struct HostArgs {
    /// The KVM device
    #[arg(long, value_name = "DEVICE", default_value = KVM_DEVICE, hide = true)]
    pub(crate) kvm: PathBuf,
    /// Try even where the processor has no hardware virtualisation (a PVM guest kernel may run there)
    #[arg(long)]
    pub(crate) software_kvm: bool,
}

/// Why no microVM with Linux can run here.
#[derive(Debug, Error)]
pub(crate) enum HostError {
    #[error("reading /proc/cpuinfo")]
    Cpuinfo(#[source] io::Error),
    #[error(
        "this host's KVM has no hardware virtualisation (no vmx or svm in /proc/cpuinfo), and a \
         stock Linux guest does not boot without: run the command in the lab, as in `firn lab \
         run -- firn ...`, or name a PVM guest kernel and give --software-kvm"
    )]
    NoHardware,
}

impl HostArgs {
    /// Refuses early what would fail late: a Linux guest where KVM cannot run one.
    pub(crate) fn require_linux(
        &self,
        virtualization: io::Result<Virtualization>,
    ) -> Result<(), HostError> {
        // A KVM device that cannot be opened has a better error of its own.
        if self.software_kvm || !self.kvm.exists() {
            return Ok(());
        }
        match virtualization.map_err(HostError::Cpuinfo)? {
            Virtualization::Hardware => Ok(()),
            Virtualization::Software => Err(HostError::NoHardware),
        }
    }
}
