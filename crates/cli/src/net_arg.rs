//! The option `--net`: a guest's network.

use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use firn_base::{ParseSizeError, parse_size};
use firn_run::{Descriptors, NetworkAddresses, NetworkSpec, StartError};
use firn_vmm::{NetworkConfig, RateLimit};
use thiserror::Error;

/// The address of a guest's interface that gets no other. Clones share it: it is that of the
/// snapshot.
const MAC: [u8; 6] = [0x02, 0x66, 0x69, 0x72, 0x6e, 0x02];
/// Bytes of the largest packet, as on Ethernet.
const MTU: u16 = 1500;
/// The smallest of IPv4 (RFC 791), which Linux's driver requires.
const LEAST_MTU: u16 = 68;

/// A guest's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NetArg {
    /// No network.
    None,
    /// A tap device.
    Tap(Box<TapArg>),
}

/// A tap device and its options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TapArg {
    name: String,
    mac: Option<[u8; 6]>,
    mtu: Option<u16>,
    address: Option<(Ipv4Addr, u8)>,
    gateway: Option<Ipv4Addr>,
    dns: Option<IpAddr>,
    to_guest: RateLimit,
    from_guest: RateLimit,
}

/// The option is not valid.
#[derive(Debug, Error)]
pub(crate) enum NetArgError {
    #[error("{0:?} is not a network: use none, or tap:NAME[,KEY=VALUE...]")]
    Kind(String),
    #[error(
        "{0:?} is not an option of a tap device: use mac, mtu, address, gateway, dns, to-guest, \
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
    #[error("{0} is chosen at the boot: it is a part of the snapshot")]
    Frozen(&'static str),
    #[error("the snapshot is of a player, which has no network: omit --net")]
    Player,
}

impl FromStr for NetArg {
    type Err = NetArgError;

    fn from_str(text: &str) -> Result<Self, NetArgError> {
        if text == "none" {
            return Ok(Self::None);
        }
        let mut parts = text.split(',');
        let tap = parts.next().and_then(|first| first.strip_prefix("tap:"));
        let name = tap.ok_or_else(|| NetArgError::Kind(text.to_owned()))?.to_owned();
        let mut tap = TapArg { name, ..TapArg::default() };
        let mut seen = Vec::new();
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                return Err(NetArgError::Key(part.to_owned()));
            };
            if seen.contains(&key) {
                return Err(NetArgError::Twice(key.to_owned()));
            }
            tap.set(key, value)?;
            seen.push(key);
        }
        tap.check()?;
        Ok(Self::Tap(Box::new(tap)))
    }
}

impl TapArg {
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
        Some(NetworkAddresses { address, prefix, gateway: self.gateway, dns: self.dns })
    }
}

impl NetArg {
    /// The device of a guest that boots.
    pub(crate) fn device(&self) -> Option<NetworkConfig> {
        match self {
            Self::None => None,
            Self::Tap(tap) => {
                Some(NetworkConfig { mac: tap.mac.unwrap_or(MAC), mtu: tap.mtu.unwrap_or(MTU) })
            }
        }
    }

    /// Opens the host's side.
    pub(crate) fn connect(
        &self,
        descriptors: &mut Descriptors,
    ) -> Result<Option<NetworkSpec>, StartError> {
        let Self::Tap(tap) = self else { return Ok(None) };
        let spec = NetworkSpec::tap(&tap.name, descriptors)?;
        let (to_guest, from_guest) = (tap.to_guest, tap.from_guest);
        Ok(Some(NetworkSpec { to_guest, from_guest, addresses: tap.addresses(), ..spec }))
    }

    /// The same for a guest that is thawed. A player has no disks.
    pub(crate) fn reconnect(
        &self,
        has_disks: bool,
        descriptors: &mut Descriptors,
    ) -> anyhow::Result<Option<NetworkSpec>> {
        match self {
            Self::Tap(_) if !has_disks => Err(NetArgError::Player.into()),
            Self::Tap(tap) if tap.mac.is_some() => Err(NetArgError::Frozen("mac").into()),
            Self::Tap(tap) if tap.mtu.is_some() => Err(NetArgError::Frozen("mtu").into()),
            _ => Ok(self.connect(descriptors)?),
        }
    }
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

fn parse_cidr(text: &str) -> Result<(Ipv4Addr, u8), NetArgError> {
    let parsed = text.split_once('/').and_then(|(address, prefix)| {
        let prefix = prefix.parse().ok().filter(|prefix| (1..=32).contains(prefix))?;
        Some((address.parse().ok()?, prefix))
    });
    parsed.ok_or_else(|| NetArgError::Cidr(text.to_owned()))
}

fn parse_rate(text: &str) -> Result<u64, NetArgError> {
    let rate = parse_size(text).map_err(|error| NetArgError::Rate(text.to_owned(), Some(error)))?;
    if rate == 0 { Err(NetArgError::Rate(text.to_owned(), None)) } else { Ok(rate) }
}

#[cfg(test)]
#[path = "net_arg_tests.rs"]
mod tests;
