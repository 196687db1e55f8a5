//! Requests that the metrics count.

/// What is counted of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names of the requests")]
pub(crate) enum Counter {
    GetInstance,
    GetVersion,
    GetMachineConfig,
    GetMmds,
    PutActions,
    PutBootSource,
    PutDrive,
    PutLogger,
    PutMachineConfig,
    PutMetrics,
    PutNetwork,
    PutMmds,
    PutVsock,
    PutSerial,
    PatchDrive,
    PatchNetwork,
    PatchMachineConfig,
    PatchMmds,
    PutCpuConfig,
}

impl Counter {
    /// Its group, and its name there.
    pub(super) const fn place(self) -> (&'static str, &'static str) {
        match self {
            Self::GetInstance => ("get_api_requests", "instance_info"),
            Self::GetVersion => ("get_api_requests", "vmm_version"),
            Self::GetMachineConfig => ("get_api_requests", "machine_cfg"),
            Self::GetMmds => ("get_api_requests", "mmds"),
            Self::PutActions => ("put_api_requests", "actions"),
            Self::PutBootSource => ("put_api_requests", "boot_source"),
            Self::PutDrive => ("put_api_requests", "drive"),
            Self::PutLogger => ("put_api_requests", "logger"),
            Self::PutMachineConfig => ("put_api_requests", "machine_cfg"),
            Self::PutMetrics => ("put_api_requests", "metrics"),
            Self::PutNetwork => ("put_api_requests", "network"),
            Self::PutMmds => ("put_api_requests", "mmds"),
            Self::PutVsock => ("put_api_requests", "vsock"),
            Self::PutSerial => ("put_api_requests", "serial"),
            Self::PatchDrive => ("patch_api_requests", "drive"),
            Self::PatchNetwork => ("patch_api_requests", "network"),
            Self::PatchMachineConfig => ("patch_api_requests", "machine_cfg"),
            Self::PatchMmds => ("patch_api_requests", "mmds"),
            Self::PutCpuConfig => ("put_api_requests", "cpu_cfg"),
        }
    }

    pub(super) const ALL: [Self; 19] = [
        Self::GetInstance,
        Self::GetVersion,
        Self::GetMachineConfig,
        Self::GetMmds,
        Self::PutActions,
        Self::PutBootSource,
        Self::PutDrive,
        Self::PutLogger,
        Self::PutMachineConfig,
        Self::PutMetrics,
        Self::PutNetwork,
        Self::PutMmds,
        Self::PutVsock,
        Self::PutSerial,
        Self::PatchDrive,
        Self::PatchNetwork,
        Self::PatchMachineConfig,
        Self::PatchMmds,
        Self::PutCpuConfig,
    ];

    /// Whether failures are counted, too.
    pub(super) fn has_failures(self) -> bool {
        self >= Self::PutActions
    }
}
