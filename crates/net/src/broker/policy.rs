//! Which addresses a guest may reach.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smoltcp::wire::IpCidr;

use super::special::{destinations, is_global};

/// Rules for the addresses that a guest reaches. The first rule that matches decides. An address
/// without a rule is allowed if IANA lists it as globally reachable, it is not multicast, and it is
/// not one of the host's own.
///
/// Clones share their counters.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    rules: Arc<[Rule]>,
    rest: Arc<Rest>,
}

/// The counters of addresses without a rule.
#[derive(Debug, Default)]
struct Rest {
    allowed: AtomicU64,
    denied: AtomicU64,
}

#[derive(Debug)]
struct Rule {
    text: String,
    allow: bool,
    range: IpCidr,
    port: Option<u16>,
    matched: AtomicU64,
}

/// How often a rule decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleCount {
    /// The rule as it was given; `default allow` or `default deny` for addresses without one.
    pub rule: String,
    /// Connections that it decided.
    pub matched: u64,
}

/// A rule is not valid.
#[derive(Debug, thiserror::Error)]
pub enum ParseRuleError {
    /// It does not begin with `allow:` or `deny:`.
    #[error("egress rule \"{0}\" begins with neither \"allow:\" nor \"deny:\"")]
    NoAction(String),
    /// The address is not valid.
    #[error(
        "egress rule \"{0}\" has no valid address or network, such as 10.0.0.0/8 or 2001:db8::1"
    )]
    InvalidNetwork(String),
    /// The port is not valid.
    #[error("egress rule \"{0}\" has no valid port; ports are 1 to 65535")]
    InvalidPort(String),
}

/// What the rules alone decide about a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Allowed,
    Denied,
    /// Allowed if the destination is not the host itself.
    AllowedUnlessLocal,
}

impl Policy {
    /// A policy of rules such as `allow:10.1.0.0/16:5432`, `deny:[2001:db8::/32]:443` or
    /// `deny:0.0.0.0/0`. A port applies to TCP and UDP.
    ///
    /// # Errors
    /// A rule is not valid.
    pub fn parse<'a>(rules: impl IntoIterator<Item = &'a str>) -> Result<Self, ParseRuleError> {
        let rules: Result<Arc<[Rule]>, _> = rules.into_iter().map(Rule::parse).collect();
        Ok(Self { rules: rules?, rest: Arc::default() })
    }

    /// How often each rule decided, in the order of the rules; those without a rule at the end.
    #[must_use]
    pub fn counts(&self) -> Vec<RuleCount> {
        let rest = [("default allow", &self.rest.allowed), ("default deny", &self.rest.denied)];
        let rules = self.rules.iter().map(|rule| (rule.text.as_str(), &rule.matched));
        let counts = rules.chain(rest).map(|(rule, matched)| RuleCount {
            rule: rule.to_owned(),
            matched: matched.load(Ordering::Relaxed),
        });
        counts.collect()
    }

    /// Checks `to`, and the IPv4 address inside it if it has one: both must be allowed.
    pub(super) fn check(&self, to: SocketAddr, is_local: impl Fn(IpAddr) -> bool) -> bool {
        let (address, embedded) = destinations(to.ip());
        let allows = |address: IpAddr| match self.verdict(address, to.port()) {
            Verdict::Allowed => true,
            Verdict::Denied => false,
            Verdict::AllowedUnlessLocal => {
                let allowed = !is_local(address);
                let count = if allowed { &self.rest.allowed } else { &self.rest.denied };
                count.fetch_add(1, Ordering::Relaxed);
                allowed
            }
        };
        embedded.is_none_or(allows) && allows(address)
    }

    fn verdict(&self, address: IpAddr, port: u16) -> Verdict {
        if let Some(rule) = self.rules.iter().find(|rule| rule.matches(address, port)) {
            rule.matched.fetch_add(1, Ordering::Relaxed);
            return if rule.allow { Verdict::Allowed } else { Verdict::Denied };
        }
        if is_global(address) {
            return Verdict::AllowedUnlessLocal;
        }
        self.rest.denied.fetch_add(1, Ordering::Relaxed);
        Verdict::Denied
    }
}

impl Rule {
    fn parse(text: &str) -> Result<Self, ParseRuleError> {
        let (allow, rest) = match text.split_once(':') {
            Some(("allow", rest)) => (true, rest),
            Some(("deny", rest)) => (false, rest),
            _ => return Err(ParseRuleError::NoAction(text.to_owned())),
        };
        let (network, port) = split_port(rest);
        let range = parse_network(network)
            .ok_or_else(|| ParseRuleError::InvalidNetwork(text.to_owned()))?;
        let port = match port.map(u16::from_str) {
            None => None,
            Some(Ok(port @ 1..)) => Some(port),
            Some(_) => return Err(ParseRuleError::InvalidPort(text.to_owned())),
        };
        Ok(Self { text: text.to_owned(), allow, range, port, matched: AtomicU64::new(0) })
    }

    fn matches(&self, address: IpAddr, port: u16) -> bool {
        self.range.contains_addr(&address.into()) && self.port.is_none_or(|own| own == port)
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

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
