use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::super::message::{Address, Answer};
use super::super::testing::name;
use super::{Full, MAX_PINS, NamePattern, PinTimes, Pins, RESOLVE_PAUSE};

const TIMES: PinTimes =
    PinTimes { least: Duration::from_secs(60), most: Duration::from_secs(3600) };

fn pins(rules: &[(&str, bool)]) -> Pins {
    let rules: Vec<_> =
        rules.iter().map(|(text, allow)| (NamePattern::parse(text).unwrap(), *allow)).collect();
    Pins::new(TIMES, rules.iter().map(|(name, allow)| Some((name, *allow))))
}

fn answer(names: &[&str], addresses: &[(&str, u64)]) -> Answer {
    let address = |(ip, ttl): &(&str, u64)| Address {
        ip: ip.parse().unwrap(),
        ttl: Duration::from_secs(*ttl),
    };
    Answer {
        names: names.iter().copied().map(name).collect(),
        addresses: addresses.iter().map(address).collect(),
        is_truncated: false,
        is_conclusive: true,
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn an_address_is_pinned_for_its_life_within_limits() {
    let now = Instant::now();
    for (ttl, kept) in [(0, 60), (60, 60), (300, 300), (1 << 30, 3600)] {
        let mut pins = pins(&[("a.b", true)]);
        pins.pin(&answer(&["a.b"], &[("1.1.1.1", ttl)]), now).unwrap();
        let last = now + Duration::from_secs(kept);
        assert!(pins.has(0, ip("1.1.1.1"), last - Duration::from_millis(1)), "{ttl}");
        assert!(!pins.has(0, ip("1.1.1.1"), last), "{ttl}");
        assert!(!pins.has(0, ip("1.1.1.2"), now) && !pins.has(1, ip("1.1.1.1"), now));
    }
    // A later answer does not make it shorter.
    let mut pins = pins(&[("a.b", true)]);
    pins.pin(&answer(&["a.b"], &[("1.1.1.1", 300)]), now).unwrap();
    pins.pin(&answer(&["a.b"], &[("1.1.1.1", 1)]), now).unwrap();
    assert!(pins.has(0, ip("1.1.1.1"), now + Duration::from_secs(299)));
}

/// The owner of a name can make it an alias of any other name.
#[test]
fn an_alias_is_denied_with_its_target_and_not_allowed_with_it() {
    let now = Instant::now();
    let mut pins = pins(&[("target.net", true), ("target.net", false), ("*.a.b", true)]);
    pins.pin(&answer(&["x.a.b", "target.net"], &[("1.1.1.1", 60)]), now).unwrap();
    let has = [0, 1, 2].map(|rule| pins.has(rule, ip("1.1.1.1"), now));
    assert_eq!(has, [false, true, true]);
}

/// A packet to either address ends at the same host.
#[test]
fn the_address_inside_another_is_pinned_with_it() {
    let now = Instant::now();
    let mut pins = pins(&[("a.b", true)]);
    let found = [("64:ff9b::101:101", 60), ("::ffff:2.2.2.2", 60)];
    pins.pin(&answer(&["a.b"], &found), now).unwrap();
    for address in ["64:ff9b::101:101", "1.1.1.1", "2.2.2.2"] {
        assert!(pins.has(0, ip(address), now), "{address}");
    }
}

#[test]
fn the_addresses_of_a_rule_are_bounded() {
    let now = Instant::now();
    let mut pins = pins(&[("*.a.b", true)]);
    let found = |number: usize, ttl| {
        let address = std::net::Ipv4Addr::from_bits(u32::try_from(number).unwrap() + (1 << 24));
        answer(&["x.a.b"], &[(address.to_string().as_str(), ttl)])
    };
    for number in 0..MAX_PINS {
        pins.pin(&found(number, if number == 0 { 60 } else { 600 }), now).unwrap();
    }
    assert_eq!(pins.pin(&found(MAX_PINS, 60), now), Err(Full));
    // One that is known has room, and so has another when one has expired.
    pins.pin(&found(1, 60), now).unwrap();
    let later = now + Duration::from_secs(60);
    pins.pin(&found(MAX_PINS, 60), later).unwrap();
    assert_eq!(pins.pin(&found(0, 60), later), Err(Full));
    assert_eq!(pins.rules[0].as_ref().unwrap().addresses.len(), MAX_PINS);
}

#[test]
fn a_name_is_resolved_again_after_its_life() {
    let now = Instant::now();
    let mut pins = pins(&[("a.b", true), ("*.a.b", true), ("A.B", false), ("c.d", true)]);
    // Two rules have one name.
    let names = [0, 1, 2, 3].map(|rule| pins.unresolved(rule, now));
    assert_eq!(names, [Some(0), None, Some(0), Some(1)]);
    assert_eq!(pins.name(1), Some(&name("c.d")));
    for (ttl, fresh) in [
        (None, RESOLVE_PAUSE),
        (Some(Duration::ZERO), RESOLVE_PAUSE),
        (Some(Duration::from_secs(300)), Duration::from_secs(300)),
        (Some(Duration::from_secs(1 << 30)), TIMES.most),
    ] {
        pins.set_resolved(0, ttl, now);
        assert_eq!(pins.unresolved(0, now + fresh - Duration::from_millis(1)), None, "{ttl:?}");
        assert_eq!(pins.unresolved(2, now + fresh), Some(0), "{ttl:?}");
    }
    assert_eq!(pins.unresolved(3, now), Some(1));
}
