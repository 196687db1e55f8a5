//! What functions reach by their network.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use firn_base::{ErrorChain, error_chain};
use firn_net::{BrokerError, Policy};
use firn_run::{Descriptors, NetworkAddresses, NetworkSpec, StartError};
use firn_vmm::{OpenTapError, open_tap};

use super::launcher::Launcher;

/// The interfaces of this thread's network namespace (proc_pid_net(5)).
const INTERFACES: &str = "/proc/thread-self/net/dev";
/// Bits of the network that each device has: two hosts and their network's two reserved addresses.
const DEVICE_PREFIX: u8 = 30;

/// The network of functions.
#[derive(Clone, Debug)]
pub enum FunctionNetwork {
    /// Sockets of this host.
    Proxy(Policy),
    /// A tap device for each microVM.
    Taps(Arc<TapDevices>),
}

/// Tap devices of this host, of which each running microVM takes one.
///
/// The kernel attaches a device to one process, so it is free when the microVM has ended.
#[derive(Debug)]
pub struct TapDevices {
    prefix: String,
    devices: Vec<TapDevice>,
    /// The device that is tried first: the one after the last that was taken.
    next: AtomicUsize,
}

#[derive(Debug)]
struct TapDevice {
    name: String,
    addresses: NetworkAddresses,
}

/// The tap devices cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FindTapsError {
    /// The interfaces of the host cannot be listed.
    #[error("cannot list the network interfaces in {INTERFACES}")]
    List(#[source] io::Error),
    /// There is none with such a name.
    #[error(
        "there is no tap device {0}0, {0}1 and so on: make each with `ip tuntap add dev {0}0 mode tap user USER` and `ip link set {0}0 up`"
    )]
    None(String),
    /// The network has no addresses for a device.
    #[error(
        "the network {network}/{prefix} has no addresses for the tap device {name}: each takes 4"
    )]
    Addresses {
        /// The device.
        name: String,
        /// The network's address.
        network: Ipv4Addr,
        /// Its bits.
        prefix: u8,
    },
    /// A device cannot be used.
    #[error(transparent)]
    Open(#[from] OpenTapError),
}

/// A microVM gets no network.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// Each microVM has one.
    #[error(
        "all {count} tap devices of --network tap:{prefix} are in use: add some, and restart the daemon"
    )]
    InUse { prefix: String, count: usize },
    #[error(transparent)]
    Start(StartError),
}

impl FunctionNetwork {
    /// The most microVMs that have this network at the same time, if there is a limit.
    pub(crate) fn limit(&self) -> Option<usize> {
        match self {
            Self::Proxy(_) => None,
            Self::Taps(taps) => Some(taps.devices.len()),
        }
    }

    /// The rules of what functions reach, if the rules are firn's.
    pub(crate) fn policy(&self) -> Option<&Policy> {
        match self {
            Self::Proxy(policy) => Some(policy),
            Self::Taps(_) => None,
        }
    }

    fn connect(&self, descriptors: &mut Descriptors) -> Result<NetworkSpec, ConnectError> {
        match self {
            Self::Proxy(policy) => {
                let report = |error: BrokerError| {
                    let error = error_chain(&error);
                    tracing::warn!(error, "a guest opens no more connections");
                };
                NetworkSpec::proxy(policy, descriptors, report).map_err(ConnectError::Start)
            }
            Self::Taps(taps) => taps.take(descriptors),
        }
    }
}

impl TapDevices {
    /// The host's tap devices whose names are `prefix` and a number. Each has a part of `network`
    /// with 2 hosts: the 4 addresses at 4 times its number. The first host is this one, the second
    /// the guest, whose name server is `dns`.
    ///
    /// # Errors
    /// There is none, `network` is too small for one, or one cannot be used, as when another
    /// program uses it.
    pub fn find(
        prefix: &str,
        (network, bits): (Ipv4Addr, u8),
        dns: Option<IpAddr>,
    ) -> Result<Self, FindTapsError> {
        let interfaces = fs::read_to_string(INTERFACES).map_err(FindTapsError::List)?;
        let names = interfaces.lines().filter_map(|line| Some(line.split_once(':')?.0.trim()));
        let numbered = |name: &str| {
            let number: u32 = name.strip_prefix(prefix)?.parse().ok()?;
            (format!("{prefix}{number}") == name).then_some(number)
        };
        let mut numbers: Vec<u32> = names.filter_map(numbered).collect();
        numbers.sort_unstable();
        if numbers.is_empty() {
            return Err(FindTapsError::None(prefix.to_owned()));
        }
        let device = |number: u32| {
            let name = format!("{prefix}{number}");
            // 30 bits at most.
            let room = DEVICE_PREFIX.checked_sub(bits);
            let fits = room.is_some_and(|room| number >> room == 0);
            if !fits {
                return Err(FindTapsError::Addresses { name, network, prefix: bits });
            }
            drop(open_tap(&name)?);
            let first = network.to_bits() + 4 * number;
            let addresses = NetworkAddresses {
                address: (first + 2).into(),
                prefix: DEVICE_PREFIX,
                gateway: Some((first + 1).into()),
                dns,
                ipv6: None,
            };
            Ok(TapDevice { name, addresses })
        };
        let devices = numbers.into_iter().map(device).collect::<Result<_, _>>()?;
        Ok(Self { prefix: prefix.to_owned(), devices, next: AtomicUsize::new(0) })
    }

    fn take(&self, descriptors: &mut Descriptors) -> Result<NetworkSpec, ConnectError> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut failed = None;
        for offset in 0..self.devices.len() {
            let device = &self.devices[first.wrapping_add(offset) % self.devices.len()];
            match open_tap(&device.name) {
                Ok(tap) => {
                    let addresses = Some(device.addresses.clone());
                    let spec = NetworkSpec::of_tap(tap, descriptors);
                    return Ok(NetworkSpec { addresses, ..spec });
                }
                Err(OpenTapError::Busy(_)) => {}
                Err(error) => failed = Some(ErrorChain::of(&error)),
            }
        }
        Err(match failed {
            Some(error) => ConnectError::Start(StartError::Host(error)),
            None => ConnectError::InUse { prefix: self.prefix.clone(), count: self.devices.len() },
        })
    }
}

impl From<ConnectError> for StartError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Start(error) => error,
            in_use @ ConnectError::InUse { .. } => Self::Host(ErrorChain::of(&in_use)),
        }
    }
}

impl Launcher {
    /// Connects a guest, if it `has_network`.
    pub(super) fn connect(
        &self,
        has_network: bool,
        descriptors: &mut Descriptors,
    ) -> Result<Option<NetworkSpec>, ConnectError> {
        let network = self.network.as_ref().filter(|_| has_network);
        network.map(|network| network.connect(descriptors)).transpose()
    }

    /// Connects a guest that has a request. Ready clones, which have none, give their devices back.
    pub(super) fn connect_now(
        &self,
        has_network: bool,
        descriptors: &mut Descriptors,
    ) -> Result<Option<NetworkSpec>, ConnectError> {
        match self.connect(has_network, descriptors) {
            Err(ConnectError::InUse { .. }) if self.ready.is_on() => {
                self.ready.forget(|key| key.network);
                self.connect(has_network, descriptors)
            }
            connected => connected,
        }
    }
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
