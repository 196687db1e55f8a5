//! The option `--network` of `firn serve`: the network of functions.

use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;
use std::sync::Arc;

use firn_control::{FindTapsError, FunctionNetwork, TapDevices};
use firn_net::Policy;
use thiserror::Error;

use crate::net_arg::parse_cidr;

/// The most bytes of the names' common part: an interface's name has 15 and a number.
const MAX_PREFIX: usize = 14;

/// A network of functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ServeNetworkArg {
    None,
    Proxy,
    Taps {
        /// What the names of the devices begin with.
        prefix: String,
        network: (Ipv4Addr, u8),
        dns: Option<IpAddr>,
    },
}

/// The option is not valid.
#[derive(Debug, Error)]
pub(crate) enum ServeNetworkArgError {
    #[error(
        "{0:?} is not a network of functions: use none, proxy or tap:PREFIX,network=ADDRESS/BITS"
    )]
    Kind(String),
    #[error("{0:?} is not the beginning of the names of tap devices, such as tap for tap0, tap1")]
    Prefix(String),
    #[error("{0:?} is not an option of a network of functions: use network or dns, as KEY=VALUE")]
    Key(String),
    #[error("{0} is given twice")]
    Twice(String),
    #[error("{0:?} is not a network for tap devices, such as 10.200.0.0/16: 30 bits at most")]
    Network(String),
    #[error("{0:?} is not the IP address of a name server")]
    Dns(String),
    #[error("tap devices need a network for their addresses, such as ,network=10.200.0.0/16")]
    NoNetwork,
    #[error("--egress needs --network proxy: the host filters what passes a tap device")]
    Egress,
}

impl FromStr for ServeNetworkArg {
    type Err = ServeNetworkArgError;

    fn from_str(text: &str) -> Result<Self, ServeNetworkArgError> {
        match text {
            "none" => return Ok(Self::None),
            "proxy" => return Ok(Self::Proxy),
            _ => {}
        }
        let mut parts = text.split(',');
        let prefix = parts.next().and_then(|kind| kind.strip_prefix("tap:"));
        let prefix = prefix.ok_or_else(|| ServeNetworkArgError::Kind(text.to_owned()))?;
        let is_name = (1..=MAX_PREFIX).contains(&prefix.len())
            && !prefix.contains(['/', ':', '\0'])
            && !prefix.contains(char::is_whitespace)
            && !prefix.ends_with(|end: char| end.is_ascii_digit());
        if !is_name {
            return Err(ServeNetworkArgError::Prefix(prefix.to_owned()));
        }
        let (mut network, mut dns) = (None, None);
        for part in parts {
            let (key, value) =
                part.split_once('=').ok_or_else(|| ServeNetworkArgError::Key(part.to_owned()))?;
            let is_new = match key {
                "network" => network.replace(parse_network(value)?).is_none(),
                "dns" => {
                    let address = value.parse();
                    let address =
                        address.map_err(|_| ServeNetworkArgError::Dns(value.to_owned()))?;
                    dns.replace(address).is_none()
                }
                _ => return Err(ServeNetworkArgError::Key(part.to_owned())),
            };
            if !is_new {
                return Err(ServeNetworkArgError::Twice(key.to_owned()));
            }
        }
        let network = network.ok_or(ServeNetworkArgError::NoNetwork)?;
        Ok(Self::Taps { prefix: prefix.to_owned(), network, dns })
    }
}

/// A network whose address has no bits of hosts.
fn parse_network(text: &str) -> Result<(Ipv4Addr, u8), ServeNetworkArgError> {
    let network = parse_cidr(text).ok().filter(|(address, bits)| {
        let hosts = u32::MAX.checked_shr((*bits).into()).unwrap_or(0);
        *bits <= 30 && address.to_bits() & hosts == 0
    });
    network.ok_or_else(|| ServeNetworkArgError::Network(text.to_owned()))
}

/// The functions' network, with the rules of `--egress`.
#[derive(Debug, Error)]
pub(crate) enum OpenServeNetworkError {
    #[error(transparent)]
    Argument(#[from] ServeNetworkArgError),
    #[error(transparent)]
    Taps(#[from] FindTapsError),
}

impl ServeNetworkArg {
    /// Finds the devices.
    pub(crate) fn open(
        self,
        policy: Policy,
        has_rules: bool,
    ) -> Result<Option<FunctionNetwork>, OpenServeNetworkError> {
        match self {
            Self::Proxy => Ok(Some(FunctionNetwork::Proxy(policy))),
            _ if has_rules => Err(ServeNetworkArgError::Egress.into()),
            Self::None => Ok(None),
            Self::Taps { prefix, network, dns } => {
                let taps = TapDevices::find(&prefix, network, dns)?;
                Ok(Some(FunctionNetwork::Taps(Arc::new(taps))))
            }
        }
    }
}

#[cfg(test)]
#[path = "serve_network_arg_tests.rs"]
mod tests;
