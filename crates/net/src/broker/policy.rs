//! Which addresses a guest may reach.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::dns::{PinTimes, Pins};
use super::rule::{ParseRuleError, Rule, Target};
use super::special::{destinations, is_global};

/// Rules for the addresses that a guest reaches. The first rule that matches decides. An address
/// without a rule is allowed if IANA lists it as globally reachable, it is not multicast, and it is
/// not one of the host's own.
///
/// A rule with a name matches the addresses that a [`Broker`](crate::Broker) has found for it. One
/// that allows matches no address that needs a rule: only a rule with a network opens those, so the
/// owner of a name cannot.
///
/// Clones share their counters.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    rules: Arc<[Rule]>,
    counts: Arc<Counts>,
    pin_times: PinTimes,
}

/// How often each rule decided.
#[derive(Debug, Default)]
struct Counts {
    rules: Box<[AtomicU64]>,
    /// Without a rule.
    allowed: AtomicU64,
    denied: AtomicU64,
    /// The counters of all guests.
    all: Option<Arc<Counts>>,
}

/// How often a rule decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleCount {
    /// The rule as it was given; `default allow` or `default deny` for addresses without one.
    pub rule: String,
    /// Connections that it decided.
    pub matched: u64,
}

/// What the rules decide about a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Allowed,
    Denied,
    /// It depends on the addresses of these names, by their numbers in the [`Pins`].
    Unresolved(Vec<usize>),
}

/// What decides about an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    Rule(usize),
    Default { allow: bool },
}

impl Policy {
    /// A policy of rules such as `allow:10.1.0.0/16:5432`, `deny:[2001:db8::/32]:443`,
    /// `deny:0.0.0.0/0`, `allow:api.example.com:443` or `allow:*.example.com`. A port applies to
    /// TCP and UDP.
    ///
    /// # Errors
    /// A rule is not valid.
    pub fn parse<'a>(rules: impl IntoIterator<Item = &'a str>) -> Result<Self, ParseRuleError> {
        let rules: Arc<[Rule]> = rules.into_iter().map(Rule::parse).collect::<Result<_, _>>()?;
        let counts = Arc::new(Counts::new(rules.len(), None));
        Ok(Self { rules, counts, pin_times: PinTimes::default() })
    }

    /// The same rules, with other limits for how long an address of a name is pinned.
    #[must_use]
    pub fn with_pin_times(self, pin_times: PinTimes) -> Self {
        Self { pin_times, ..self }
    }

    /// The same rules for one guest, with counters of its own. What they count is counted here as
    /// well.
    #[must_use]
    pub fn for_guest(&self) -> Self {
        let counts = Arc::new(Counts::new(self.rules.len(), Some(self.counts.clone())));
        Self { counts, ..self.clone() }
    }

    /// How often each rule decided, in the order of the rules; those without a rule at the end.
    #[must_use]
    pub fn counts(&self) -> Vec<RuleCount> {
        let counts = &self.counts;
        let rest = [("default allow", &counts.allowed), ("default deny", &counts.denied)];
        let rules = self.rules.iter().map(|rule| rule.text.as_str()).zip(&counts.rules);
        let counts = rules.chain(rest).map(|(rule, matched)| RuleCount {
            rule: rule.to_owned(),
            matched: matched.load(Ordering::Relaxed),
        });
        counts.collect()
    }

    /// Whether a rule has a name.
    pub(super) fn has_names(&self) -> bool {
        self.rules.iter().any(|rule| rule.name().is_some())
    }

    /// No pins for a guest with these rules.
    pub(super) fn pins(&self) -> Pins {
        Pins::new(self.pin_times, self.rules.iter().map(Rule::name))
    }

    /// Decides about `to`, and the IPv4 address inside it if it has one: both must be allowed. What
    /// is decided is counted. With `is_last` it is decided with the addresses that are known.
    pub(super) fn decide(
        &self,
        to: SocketAddr,
        (pins, now): (&Pins, Instant),
        is_local: impl Fn(IpAddr) -> bool,
        is_last: bool,
    ) -> Decision {
        let (address, embedded) = destinations(to.ip());
        let (mut reasons, mut is_allowed) = (Vec::with_capacity(2), true);
        for address in
            embedded.into_iter().chain([address]).map(|ip| SocketAddr::new(ip, to.port()))
        {
            let (reason, unresolved) = self.reason(address, (pins, now), &is_local);
            if !unresolved.is_empty() && !is_last {
                return Decision::Unresolved(unresolved);
            }
            reasons.push(reason);
            is_allowed = match reason {
                Reason::Rule(number) => self.rules[number].allow,
                Reason::Default { allow } => allow,
            };
            if !is_allowed {
                break;
            }
        }
        for reason in reasons {
            self.counts.add(reason);
        }
        if is_allowed { Decision::Allowed } else { Decision::Denied }
    }

    /// What decides about an address with the pins that there are, and the names whose addresses
    /// could change the decision.
    fn reason(
        &self,
        to: SocketAddr,
        (pins, now): (&Pins, Instant),
        is_local: &impl Fn(IpAddr) -> bool,
    ) -> (Reason, Vec<usize>) {
        let address = to.ip();
        let mut known = None;
        let mut is_open = || *known.get_or_insert_with(|| is_global(address) && !is_local(address));
        let mut unresolved = Vec::new();
        let of_port = |(_, rule): &(usize, &Rule)| rule.port.is_none_or(|own| own == to.port());
        let matching = self.rules.iter().enumerate().filter(of_port).find(|(number, rule)| {
            match rule.target {
                Target::Network(range) => range.contains_addr(&address.into()),
                Target::Name(_) if rule.allow && !is_open() => false,
                Target::Name(_) if pins.has(*number, address, now) => true,
                Target::Name(_) => {
                    let name = pins.unresolved(*number, now);
                    unresolved.extend(name.map(|name| (name, rule.allow)));
                    false
                }
            }
        });
        let (reason, allow) = match matching {
            Some((number, rule)) => (Reason::Rule(number), rule.allow),
            None => (Reason::Default { allow: is_open() }, is_open()),
        };
        let names = unresolved.into_iter().filter(|name| name.1 != allow).map(|name| name.0);
        (reason, names.collect())
    }
}

impl Counts {
    fn new(rules: usize, all: Option<Arc<Self>>) -> Self {
        let rules = (0..rules).map(|_| AtomicU64::new(0)).collect();
        Self { rules, all, ..Self::default() }
    }

    fn add(&self, reason: Reason) {
        let count = match reason {
            Reason::Rule(number) => &self.rules[number],
            Reason::Default { allow: true } => &self.allowed,
            Reason::Default { allow: false } => &self.denied,
        };
        count.fetch_add(1, Ordering::Relaxed);
        if let Some(all) = &self.all {
            all.add(reason);
        }
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
