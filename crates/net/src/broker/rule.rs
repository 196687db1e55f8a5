//! A rule of a policy.

use std::net::IpAddr;
use std::str::FromStr;

use smoltcp::wire::IpCidr;

use super::dns::{NameError, NamePattern};

/// A rule: what it matches, and what it decides.
#[derive(Debug)]
pub(super) struct Rule {
    /// As it was given.
    pub(super) text: String,
    pub(super) allow: bool,
    pub(super) target: Target,
    /// `None` for all ports, and ICMP echo.
    pub(super) port: Option<u16>,
}

/// The addresses that a rule matches.
#[derive(Debug)]
pub(super) enum Target {
    Network(IpCidr),
    /// Those that a name has.
    Name(NamePattern),
}

/// A rule is not valid.
#[derive(Debug, thiserror::Error)]
pub enum ParseRuleError {
    /// It does not begin with `allow:` or `deny:`.
    #[error("egress rule \"{0}\" begins with neither \"allow:\" nor \"deny:\"")]
    NoAction(String),
    /// The address is not valid.
    #[error(
        "egress rule \"{0}\" has no valid address, network or host name, such as 10.0.0.0/8, \
         2001:db8::1 or api.example.com"
    )]
    InvalidNetwork(String),
    /// The host name is not valid.
    #[error("egress rule \"{0}\" has no valid host name")]
    InvalidName(String, #[source] NameError),
    /// The port is not valid.
    #[error("egress rule \"{0}\" has no valid port; ports are 1 to 65535")]
    InvalidPort(String),
}

impl Rule {
    pub(super) fn parse(text: &str) -> Result<Self, ParseRuleError> {
        let (allow, rest) = match text.split_once(':') {
            Some(("allow", rest)) => (true, rest),
            Some(("deny", rest)) => (false, rest),
            _ => return Err(ParseRuleError::NoAction(text.to_owned())),
        };
        let (destination, port) = split_port(rest);
        let target = match parse_network(destination) {
            Some(range) => Target::Network(range),
            None if is_name(rest, destination) => {
                let name = NamePattern::parse(destination);
                let invalid = |error| ParseRuleError::InvalidName(text.to_owned(), error);
                Target::Name(name.map_err(invalid)?)
            }
            None => return Err(ParseRuleError::InvalidNetwork(text.to_owned())),
        };
        let port = match port.map(u16::from_str) {
            None => None,
            Some(Ok(port @ 1..)) => Some(port),
            Some(_) => return Err(ParseRuleError::InvalidPort(text.to_owned())),
        };
        Ok(Self { text: text.to_owned(), allow, target, port })
    }

    /// The rule's name, and whether the rule allows it.
    pub(super) fn name(&self) -> Option<(&NamePattern, bool)> {
        match &self.target {
            Target::Network(_) => None,
            Target::Name(name) => Some((name, self.allow)),
        }
    }
}

/// Splits `10.0.0.0/8:443` and `[2001:db8::/32]:443`; an IPv6 network without brackets has no port.
fn split_port(text: &str) -> (&str, Option<&str>) {
    if let Some((network, rest)) = text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        // What follows the bracket is nothing, or a colon and a port.
        let port = (!rest.is_empty()).then(|| rest.strip_prefix(':').unwrap_or_default());
        return (network, port);
    }
    match text.split_once(':') {
        Some((network, port)) if !port.contains(':') => (network, Some(port)),
        _ => (text, None),
    }
}

/// Whether a text that is no address is meant as a host name. The last label of one is not a number
/// (RFC 3696, 2).
fn is_name(rest: &str, text: &str) -> bool {
    let text = text.strip_suffix('.').unwrap_or(text);
    let last = text.rsplit('.').next().unwrap_or_default();
    let is_number = last.bytes().all(|byte| byte.is_ascii_digit());
    let has_other = rest.starts_with('[') || text.contains(['/', ':']);
    !text.is_empty() && !has_other && (last.is_empty() || !is_number)
}

fn parse_network(text: &str) -> Option<IpCidr> {
    let (address, prefix) = match text.split_once('/') {
        Some((address, prefix)) => (address, Some(prefix.parse::<u8>().ok()?)),
        None => (text, None),
    };
    let address = IpAddr::from_str(address).ok()?;
    // Addresses inside IPv6 ones are taken out before a rule is compared.
    if let IpAddr::V6(address) = address
        && address.to_ipv4_mapped().is_some()
    {
        return None;
    }
    let bits = if address.is_ipv4() { 32 } else { 128 };
    let prefix = prefix.unwrap_or(bits);
    (prefix <= bits).then(|| IpCidr::new(address.into(), prefix))
}
