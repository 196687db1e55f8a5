//! The addresses that names have.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::message::Answer;
use super::name::{Name, NamePattern};
use super::{PinTimes, RESOLVE_PAUSE};
use crate::broker::special::destinations;

/// Addresses of a rule at the same time.
const MAX_PINS: usize = 1024;

/// The pinned addresses of one guest, for each rule with a name.
#[derive(Debug)]
pub(in crate::broker) struct Pins {
    times: PinTimes,
    /// By the number of the rule; `None` for a network.
    rules: Vec<Option<RulePins>>,
    /// The names that can be resolved, each once.
    exact: Vec<ExactName>,
}

#[derive(Debug)]
struct RulePins {
    pattern: NamePattern,
    /// A rule that denies has the addresses of aliases' targets, too.
    allow: bool,
    /// The number of its name; `None` for names below one.
    exact: Option<usize>,
    /// Until when each is pinned.
    addresses: HashMap<IpAddr, Instant>,
}

#[derive(Debug)]
struct ExactName {
    name: Name,
    /// Until when its addresses are known; `None` before the broker has resolved it.
    fresh_until: Option<Instant>,
}

/// A rule has as many addresses as it can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

impl Pins {
    /// No pins, for rules in their order: those with a name have it, and whether they allow it.
    pub(in crate::broker) fn new<'a>(
        times: PinTimes,
        rules: impl Iterator<Item = Option<(&'a NamePattern, bool)>>,
    ) -> Self {
        let mut exact: Vec<ExactName> = Vec::new();
        let rules = rules.map(|rule| {
            let (pattern, allow) = rule?;
            let number = match pattern {
                NamePattern::Below(_) => None,
                NamePattern::Exact(name) => {
                    let known = exact.iter().position(|known| known.name == *name);
                    Some(known.unwrap_or_else(|| {
                        exact.push(ExactName { name: name.clone(), fresh_until: None });
                        exact.len() - 1
                    }))
                }
            };
            let pattern = pattern.clone();
            Some(RulePins { pattern, allow, exact: number, addresses: HashMap::new() })
        });
        let rules = rules.collect();
        Self { times, rules, exact }
    }

    /// Whether a name of rule `number` has `address`.
    pub(in crate::broker) fn has(&self, number: usize, address: IpAddr, now: Instant) -> bool {
        let until = self.rule(number).and_then(|rule| rule.addresses.get(&address));
        until.is_some_and(|until| now < *until)
    }

    /// The name of rule `number`, if its addresses are not known.
    pub(in crate::broker) fn unresolved(&self, number: usize, now: Instant) -> Option<usize> {
        let exact = self.rule(number)?.exact?;
        let is_fresh = self.exact.get(exact)?.fresh_until.is_some_and(|until| now < until);
        (!is_fresh).then_some(exact)
    }

    fn rule(&self, number: usize) -> Option<&RulePins> {
        self.rules.get(number)?.as_ref()
    }

    /// Pins the addresses of an answer for each rule that has its name.
    pub(super) fn pin(&mut self, answer: &Answer, now: Instant) -> Result<(), Full> {
        for rule in self.rules.iter_mut().flatten() {
            // The owner of an alias decides which name that is one of; so an alias of an allowed
            // name is not allowed with it, but one of a denied name is denied.
            let names = answer.names.get(..if rule.allow { 1 } else { answer.names.len() });
            if !names.unwrap_or_default().iter().any(|name| rule.pattern.matches(name)) {
                continue;
            }
            for address in &answer.addresses {
                let until = now + address.ttl.clamp(self.times.least, self.times.most);
                let (ip, embedded) = destinations(address.ip);
                rule.pin(ip, until, now)?;
                embedded.map_or(Ok(()), |ip| rule.pin(ip, until, now))?;
            }
        }
        Ok(())
    }

    /// The name that [`Pins::unresolved`] gave.
    pub(super) fn name(&self, exact: usize) -> Option<&Name> {
        self.exact.get(exact).map(|exact| &exact.name)
    }

    /// The name was resolved: its shortest record lives that long; `None` if it has no address, or
    /// no resolver has answered.
    pub(super) fn set_resolved(&mut self, exact: usize, ttl: Option<Duration>, now: Instant) {
        if let Some(exact) = self.exact.get_mut(exact) {
            let most = self.times.most.max(RESOLVE_PAUSE);
            exact.fresh_until = Some(now + ttl.unwrap_or_default().clamp(RESOLVE_PAUSE, most));
        }
    }
}

impl RulePins {
    fn pin(&mut self, address: IpAddr, until: Instant, now: Instant) -> Result<(), Full> {
        if self.addresses.len() >= MAX_PINS {
            self.addresses.retain(|_, until| now < *until);
        }
        if self.addresses.len() >= MAX_PINS && !self.addresses.contains_key(&address) {
            return Err(Full);
        }
        let known = self.addresses.entry(address).or_insert(until);
        *known = until.max(*known);
        Ok(())
    }
}

#[cfg(test)]
#[path = "pins_tests.rs"]
mod tests;
