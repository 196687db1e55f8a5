//! The options `--net`, `--egress` and `--publish`: a guest's network.

use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use clap::Args;
use firn_base::{ParseSizeError, parse_size};
use firn_net::{BrokerError, GuestNetwork, Policy, PublishedPort, PublishedPorts};
use firn_run::{Descriptors, NetworkAddresses, NetworkSpec};
use firn_vmm::{NetworkConfig, RateLimit, TokenBucket};
use thiserror::Error;

use crate::metadata_arg::MetadataArg;
use crate::output::print_error;

/// The smallest of IPv4 (RFC 791), which Linux's driver requires.
const LEAST_MTU: u16 = 68;

/// A guest's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NetArg {
    /// No network.
    None,
    /// A network of a guest's own.
    Some(Box<Network>),
}

/// A network and its options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Network {
    /// The tap device; without one it is the user-mode network.
    tap: Option<String>,
    mac: Option<[u8; 6]>,
    mtu: Option<u16>,
    address: Option<(Ipv4Addr, u8)>,
    gateway: Option<Ipv4Addr>,
    dns: Option<IpAddr>,
    to_guest: RateLimit,
    from_guest: RateLimit,
}

/// The options for a guest's network.
#[derive(Debug, Args)]
pub(crate) struct NetArgs {
    /// The guest's network: none, proxy[,KEY=VALUE...] or tap:NAME[,KEY=VALUE...]; see
    /// docs/concepts/network.md
    #[arg(long, value_name = "NETWORK", default_value = "none")]
    pub(crate) net: NetArg,
    /// With --net proxy: allow:NETWORK, allow:NETWORK:PORT such as allow:10.0.0.0/8:5432 (an IPv6
    /// network with a port in brackets), a host name as allow:api.example.com:443 or
    /// allow:*.example.com, or the same with deny; the first rule that matches decides, and without
    /// one the guest reaches what is globally reachable
    #[arg(long, value_name = "RULE")]
    egress: Vec<String>,
    /// With --net proxy: connect programs of this host to a port of the guest, as PORT:GUEST or
    /// HOST:PORT:GUEST such as 8080:80 or 0.0.0.0:8080:80 (an IPv6 address in brackets), or as
    /// unix:PATH:GUEST; without HOST it is 127.0.0.1, and port 0 is one that is free
    #[arg(long, value_name = "PORT")]
    publish: Vec<String>,
    /// A JSON object that the guest reads over HTTP at 169.254.169.254:
    /// FILE, with ,version=2 to require tokens and ,address=ADDRESS for another address; see
    /// docs/concepts/network.md
    #[arg(long, value_name = "FILE")]
    metadata: Option<MetadataArg>,
}

/// The host's side of a guest's network.
#[derive(Debug, Default)]
pub(crate) struct Connected {
    /// For the monitor.
    pub(crate) network: Option<NetworkSpec>,
    /// Kept until the microVM has ended.
    pub(crate) ports: PublishedPorts,
}

/// The option is not valid.
#[derive(Debug, Error)]
pub(crate) enum NetArgError {
    #[error("{0:?} is not a network: use none, proxy or tap:NAME, with ,KEY=VALUE for each option")]
    Kind(String),
    #[error(
        "{0:?} is not an option of a network: use mac, mtu, address, gateway, dns, to-guest, \
         to-guest-frames, from-guest or from-guest-frames, as KEY=VALUE"
    )]
    Key(String),
    #[error("{0} is given twice")]
    Twice(String),
    #[error("{0:?} is not a MAC address of one interface, such as 02:00:00:00:00:07")]
    Mac(String),
    #[error("{0:?} is not an MTU: use {LEAST_MTU} to 65535 bytes")]
    Mtu(String),
    #[error("{0:?} is not an IPv4 address with the bits of its network, such as 10.0.0.2/24")]
    Cidr(String),
    #[error("{key}: {value:?} is not an address of {family}")]
    Address { key: &'static str, value: String, family: &'static str },
    #[error("{0} needs address, such as address=10.0.0.2/24")]
    NeedsAddress(&'static str),
    #[error("the gateway {0} is not in the guest's network")]
    Outside(Ipv4Addr),
    #[error("{0:?} is not a rate per second: use 1 or more, such as 10M")]
    Rate(String, #[source] Option<ParseSizeError>),
    #[error("address, gateway and dns are fixed in the network proxy: use a tap device")]
    Addresses,
    #[error("{0} is not an MTU of the network proxy: use 1280 to 65520 bytes")]
    ProxyMtu(u16),
    #[error("--egress needs --net proxy: the host filters what passes a tap device")]
    Egress,
    #[error("--publish needs --net proxy: programs reach a guest with a tap device by its address")]
    Publish,
    #[error("{0} is chosen at the boot: it is a part of the snapshot")]
    Frozen(&'static str),
    #[error("--metadata needs a network device: add --net proxy or --net tap:NAME")]
    Metadata,
    #[error("the snapshot is of a player, which has no network: omit --net and --metadata")]
    Player,
}

impl FromStr for NetArg {
    type Err = NetArgError;

    fn from_str(text: &str) -> Result<Self, NetArgError> {
        if text == "none" {
            return Ok(Self::None);
        }
        let mut parts = text.split(',');
        let kind = parts.next().unwrap_or_default();
        let tap = match (kind, kind.strip_prefix("tap:")) {
            ("proxy", _) => None,
            (_, Some(name)) => Some(name.to_owned()),
            _ => return Err(NetArgError::Kind(text.to_owned())),
        };
        let mut network = Network { tap, ..Network::default() };
        let mut seen = Vec::new();
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                return Err(NetArgError::Key(part.to_owned()));
            };
            if seen.contains(&key) {
                return Err(NetArgError::Twice(key.to_owned()));
            }
            network.set(key, value)?;
            seen.push(key);
        }
        network.check()?;
        Ok(Self::Some(Box::new(network)))
    }
}

impl Network {
    fn set(&mut self, key: &str, value: &str) -> Result<(), NetArgError> {
        let address = |key, family| NetArgError::Address { key, value: value.to_owned(), family };
        match key {
            "mac" => self.mac = Some(parse_mac(value)?),
            "mtu" => {
                let mtu = value.parse().ok().filter(|mtu| *mtu >= LEAST_MTU);
                self.mtu = Some(mtu.ok_or_else(|| NetArgError::Mtu(value.to_owned()))?);
            }
            "address" => self.address = Some(parse_cidr(value)?),
            "gateway" => {
                let gateway = value.parse().map_err(|_| address("gateway", "IPv4"))?;
                self.gateway = Some(gateway);
            }
            "dns" => self.dns = Some(value.parse().map_err(|_| address("dns", "IPv4 or IPv6"))?),
            "to-guest" => self.to_guest.bytes = Some(parse_rate(value)?),
            "to-guest-frames" => self.to_guest.operations = Some(parse_rate(value)?),
            "from-guest" => self.from_guest.bytes = Some(parse_rate(value)?),
            "from-guest-frames" => self.from_guest.operations = Some(parse_rate(value)?),
            _ => return Err(NetArgError::Key(key.to_owned())),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), NetArgError> {
        if self.tap.is_none() {
            let is_given = self.address.is_some() || self.gateway.is_some() || self.dns.is_some();
            return match self.mtu {
                _ if is_given => Err(NetArgError::Addresses),
                Some(mtu) if !(GuestNetwork::MIN_MTU..=GuestNetwork::MAX_MTU).contains(&mtu) => {
                    Err(NetArgError::ProxyMtu(mtu))
                }
                _ => Ok(()),
            };
        }
        let Some((address, prefix)) = self.address else {
            return match (self.gateway, self.dns) {
                (Some(_), _) => Err(NetArgError::NeedsAddress("gateway")),
                (None, Some(_)) => Err(NetArgError::NeedsAddress("dns")),
                (None, None) => Ok(()),
            };
        };
        let host_bits = 32 - u32::from(prefix);
        let network = |address: Ipv4Addr| address.to_bits().checked_shr(host_bits);
        match self.gateway {
            Some(gateway) if network(gateway) != network(address) => {
                Err(NetArgError::Outside(gateway))
            }
            _ => Ok(()),
        }
    }

    fn addresses(&self) -> Option<NetworkAddresses> {
        let (address, prefix) = self.address?;
        let (gateway, dns) = (self.gateway, self.dns);
        Some(NetworkAddresses { address, prefix, gateway, dns, ipv6: None })
    }
}

impl NetArg {
    /// The device of a guest that boots.
    pub(crate) fn device(&self) -> Option<NetworkConfig> {
        let Self::Some(network) = self else { return None };
        let NetworkConfig { mac, mtu } = NetworkConfig::default();
        Some(NetworkConfig { mac: network.mac.unwrap_or(mac), mtu: network.mtu.unwrap_or(mtu) })
    }
}

impl NetArgs {
    /// Opens the host's side of a guest that boots.
    pub(crate) fn connect(&self, descriptors: &mut Descriptors) -> anyhow::Result<Connected> {
        if self.metadata.is_some() && self.net == NetArg::None {
            return Err(NetArgError::Metadata.into());
        }
        self.connect_any(descriptors)
    }

    fn connect_any(&self, descriptors: &mut Descriptors) -> anyhow::Result<Connected> {
        let Connected { network, ports } = self.connect_end(descriptors)?;
        let Some(metadata) = &self.metadata else { return Ok(Connected { network, ports }) };
        let metadata = Some(metadata.read()?);
        let network = Some(NetworkSpec { metadata, ..network.unwrap_or_default() });
        Ok(Connected { network, ports })
    }

    fn connect_end(&self, descriptors: &mut Descriptors) -> anyhow::Result<Connected> {
        let policy = Policy::parse(self.egress.iter().map(String::as_str))?;
        let network = match &self.net {
            NetArg::Some(network) if network.tap.is_none() => network,
            _ if !self.egress.is_empty() => return Err(NetArgError::Egress.into()),
            _ if !self.publish.is_empty() => return Err(NetArgError::Publish.into()),
            NetArg::Some(network) => network,
            NetArg::None => return Ok(Connected::default()),
        };
        let mut ports = PublishedPorts::open(self.publish.iter().map(String::as_str))?;
        let spec = match &network.tap {
            Some(name) => {
                let addresses = network.addresses();
                NetworkSpec { addresses, ..NetworkSpec::tap(name, descriptors)? }
            }
            None => {
                let report = |error: BrokerError| print_error(&error);
                NetworkSpec::publishing(&policy, &mut ports, descriptors, report)?
            }
        };
        let (to_guest, from_guest) = (network.to_guest, network.from_guest);
        let network = Some(NetworkSpec { to_guest, from_guest, ..spec });
        Ok(Connected { network, ports })
    }

    /// The same for a guest that is thawed, which may have a network device although it is
    /// connected to nothing. A player has no disks.
    pub(crate) fn reconnect(
        &self,
        has_disks: bool,
        descriptors: &mut Descriptors,
    ) -> anyhow::Result<Connected> {
        match &self.net {
            NetArg::Some(_) if !has_disks => Err(NetArgError::Player.into()),
            NetArg::None if self.metadata.is_some() && !has_disks => {
                Err(NetArgError::Player.into())
            }
            NetArg::Some(net) if net.mac.is_some() => Err(NetArgError::Frozen("mac").into()),
            NetArg::Some(net) if net.mtu.is_some() => Err(NetArgError::Frozen("mtu").into()),
            _ => self.connect_any(descriptors),
        }
    }
}

/// Published ports for people, after what else a line has.
pub(crate) fn published(ports: &[PublishedPort]) -> String {
    let text = |port: &PublishedPort| {
        format!("; {} is port {} of the guest", port.address, port.guest_port)
    };
    ports.iter().map(text).collect()
}

fn parse_mac(text: &str) -> Result<[u8; 6], NetArgError> {
    let bytes = text.split(':').map(|byte| {
        let digits = byte.len() == 2 && byte.chars().all(|digit| digit.is_ascii_hexdigit());
        digits.then(|| u8::from_str_radix(byte, 16).ok()).flatten()
    });
    let bytes: Option<Vec<u8>> = bytes.collect();
    let mac = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    // The lowest bit of the first byte marks addresses of groups.
    let mac = mac.filter(|mac| mac[0] & 1 == 0 && *mac != [0; 6]);
    mac.ok_or_else(|| NetArgError::Mac(text.to_owned()))
}

pub(crate) fn parse_cidr(text: &str) -> Result<(Ipv4Addr, u8), NetArgError> {
    let parsed = text.split_once('/').and_then(|(address, prefix)| {
        let prefix = prefix.parse().ok().filter(|prefix| (1..=32).contains(prefix))?;
        Some((address.parse().ok()?, prefix))
    });
    parsed.ok_or_else(|| NetArgError::Cidr(text.to_owned()))
}

fn parse_rate(text: &str) -> Result<TokenBucket, NetArgError> {
    let rate = parse_size(text).map_err(|error| NetArgError::Rate(text.to_owned(), Some(error)))?;
    if rate == 0 {
        return Err(NetArgError::Rate(text.to_owned(), None));
    }
    Ok(TokenBucket::per_second(rate))
}

#[cfg(test)]
#[path = "net_arg_tests.rs"]
mod tests;
