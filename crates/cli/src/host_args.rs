//! What commands that run a microVM need of the host.

use std::path::PathBuf;

use clap::Args;

use firn_run::jail::JailMode;
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

/// Options of a command whose microVM is in a monitor of its own.
#[derive(Debug, Clone, Args)]
pub(crate) struct MonitorHostArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Whether the monitor is jailed: as far as this host can, by all walls or not at all, or
    /// never: auto, require or off
    #[arg(long, value_name = "MODE", default_value_t)]
    pub(crate) jail: JailMode,
}
