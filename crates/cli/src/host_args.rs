//! What commands that run a microVM need of the host.

use std::path::PathBuf;

use clap::Args;

use firn_vmm::KVM_DEVICE;

/// Options of every command with a microVM.
#[derive(Debug, Clone, Args)]
pub(crate) struct HostArgs {
    /// The KVM device
    #[arg(long, value_name = "DEVICE", default_value = KVM_DEVICE, hide = true)]
    pub(crate) kvm: PathBuf,
    /// Try even where the processor has no hardware virtualisation (a PVM guest kernel may run
    /// there)
    #[arg(long)]
    pub(crate) software_kvm: bool,
}
