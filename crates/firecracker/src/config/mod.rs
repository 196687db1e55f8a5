//! The resources of a microVM, with Firecracker's names and forms.
//!
//! Every type refuses fields that it does not know. A `TryFrom` or `check` refuses values that are
//! not valid, or that firn does not support; the message names the field.

mod devices;
mod limits;
mod machine;
mod planner;
mod snapshot;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub(crate) use devices::{
    Balloon, BalloonStatisticsUpdate, BalloonUpdate, CacheType, Drive, DriveUpdate, Entropy,
    IoEngine, MmdsConfig, MmdsVersion, NetworkInterface, NetworkInterfaceUpdate, Serial, Vsock,
};
pub(crate) use limits::{RateLimiter, TokenBucket};
pub(crate) use machine::{BootSource, MachineConfig, MachineConfigUpdate};
pub(crate) use planner::PlannerChoice;
pub(crate) use snapshot::{BackendType, CreateSnapshot, LoadSnapshot, SnapshotType};

use crate::logger::LoggerConfig;
use crate::metrics::MetricsConfig;

/// A value that is not valid, or that firn does not support.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum ValueError {
    /// The value of a field is not valid.
    #[error("{field} is not valid: {reason}")]
    Invalid {
        /// The field, in JSON.
        field: &'static str,
        /// Why.
        reason: String,
    },
    /// Firecracker has the field, and firn does not support the value.
    #[error("{field} is not supported: {reason}")]
    Unsupported {
        /// The field, in JSON.
        field: &'static str,
        /// Why, and what to send instead.
        reason: &'static str,
    },
}

impl ValueError {
    pub(crate) fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { field, reason: reason.into() }
    }

    pub(crate) fn unsupported(field: &'static str, reason: &'static str) -> Self {
        Self::Unsupported { field, reason }
    }
}

/// All resources: the configuration file, and the answer of `GET /vm/config`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct VmConfig {
    /// The memory balloon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) balloon: Option<Balloon>,
    /// The disks.
    #[serde(default)]
    pub(crate) drives: Vec<Drive>,
    /// The kernel; empty for a microVM from a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) boot_source: Option<BootSource>,
    /// The log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) logger: Option<LoggerConfig>,
    /// vCPUs and memory.
    #[serde(default)]
    pub(crate) machine_config: MachineConfig,
    /// The file of the metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<MetricsConfig>,
    /// How the guest reaches its metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mmds_config: Option<MmdsConfig>,
    /// The network devices.
    #[serde(default)]
    pub(crate) network_interfaces: Vec<NetworkInterface>,
    /// The vsock device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) vsock: Option<Vsock>,
    /// The entropy device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) entropy: Option<Entropy>,
    /// The serial port's output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) serial: Option<Serial>,
    /// firn's own: the planner of a load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) firn_planner: Option<PlannerChoice>,
}
