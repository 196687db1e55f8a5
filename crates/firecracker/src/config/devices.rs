//! Devices.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::{RateLimiter, TokenBucket};

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Drive {
    /// Its id.
    pub(crate) drive_id: String,
    /// Whether the guest boots from it.
    pub(crate) is_root_device: bool,
    /// The partition that the guest boots from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) partuuid: Option<String>,
    /// What a flush of the guest does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache_type: Option<CacheType>,
    /// Whether the guest cannot write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) is_read_only: Option<bool>,
    /// Path of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) path_on_host: Option<String>,
    /// Its limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate_limiter: Option<RateLimiter>,
    /// How the file is read and written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) io_engine: Option<IoEngine>,
    /// Path of the socket of a vhost-user backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) socket: Option<String>,
}

/// What a flush of the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CacheType {
    /// Nothing.
    Unsafe,
    /// It writes to storage.
    Writeback,
}

/// How a disk's file is read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum IoEngine {
    /// By system calls that wait.
    Sync,
    /// By io_uring.
    Async,
}

/// A change of a disk while the guest runs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DriveUpdate {
    /// Its id.
    pub(crate) drive_id: String,
    /// Path of the new file.
    #[serde(default)]
    pub(crate) path_on_host: Option<String>,
    /// Its new limits.
    #[serde(default)]
    pub(crate) rate_limiter: Option<RateLimiter>,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NetworkInterface {
    /// Its id.
    pub(crate) iface_id: String,
    /// The tap device.
    pub(crate) host_dev_name: String,
    /// The guest's address on the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) guest_mac: Option<String>,
    /// The largest frame that the guest sends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<u16>,
    /// Limits of frames to the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rx_rate_limiter: Option<RateLimiter>,
    /// Limits of frames from the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tx_rate_limiter: Option<RateLimiter>,
}

/// A change of a network device while the guest runs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NetworkInterfaceUpdate {
    /// Its id.
    pub(crate) iface_id: String,
    /// New limits of frames to the guest.
    #[serde(default)]
    pub(crate) rx_rate_limiter: Option<RateLimiter>,
    /// New limits of frames from the guest.
    #[serde(default)]
    pub(crate) tx_rate_limiter: Option<RateLimiter>,
}

/// The vsock device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Vsock {
    /// The guest's address.
    pub(crate) guest_cid: u32,
    /// Path of the socket for connections to the guest.
    pub(crate) uds_path: String,
    /// An id without a meaning, which older clients send.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) vsock_id: Option<String>,
}

/// How the guest reaches its metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MmdsConfig {
    /// Whether the guest needs a token.
    #[serde(default)]
    pub(crate) version: MmdsVersion,
    /// The network devices that reach it.
    pub(crate) network_interfaces: Vec<String>,
    /// Its address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ipv4_address: Option<Ipv4Addr>,
    /// Whether the guest gets text even where it accepts JSON.
    #[serde(default)]
    pub(crate) imds_compat: bool,
}

/// A version of the metadata service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MmdsVersion {
    /// Without tokens.
    #[default]
    V1,
    /// With tokens.
    V2,
}

/// The memory balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Balloon {
    /// Its target, MiB.
    pub(crate) amount_mib: u32,
    /// Whether it shrinks when the guest lacks memory.
    pub(crate) deflate_on_oom: bool,
    /// The period of the guest's statistics, s; 0 for none.
    #[serde(default)]
    pub(crate) stats_polling_interval_s: u16,
    /// Whether the guest hints at free pages on request.
    #[serde(default)]
    pub(crate) free_page_hinting: bool,
    /// Whether the guest reports free pages.
    #[serde(default)]
    pub(crate) free_page_reporting: bool,
}

/// A new target of the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BalloonUpdate {
    /// MiB.
    pub(crate) amount_mib: u32,
}

/// A new period of the balloon's statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BalloonStatisticsUpdate {
    /// Seconds.
    pub(crate) stats_polling_interval_s: u16,
}

/// The entropy device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entropy {
    /// Its limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate_limiter: Option<RateLimiter>,
}

/// The serial port's output.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Serial {
    /// The file that gets it instead of standard output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) serial_out_path: Option<String>,
    /// The limit of its bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate_limiter: Option<TokenBucket>,
}
