use std::net::IpAddr;
use std::time::Instant;

use super::{Decision, ParseRuleError, Policy};
use crate::broker::dns::testing::{pin, set_resolved};
use crate::broker::dns::{NameError, Pins};

/// The host's own address in these tests.
fn is_local(address: IpAddr) -> bool {
    address.to_string() == "9.9.9.9"
}

fn allows(policy: &Policy, to: &str) -> bool {
    match decide(policy, &policy.pins(), to) {
        Decision::Allowed => true,
        Decision::Denied => false,
        Decision::Unresolved(names) => panic!("{to}: {names:?}"),
    }
}

fn decide(policy: &Policy, pins: &Pins, to: &str) -> Decision {
    policy.decide(to.parse().unwrap(), (pins, Instant::now()), is_local, false)
}

#[test]
fn without_rules_what_is_global_and_not_the_host_is_allowed() {
    let policy = Policy::default();
    for (to, allowed) in [
        ("8.8.8.8:443", true),
        ("[2606:4700::1111]:443", true),
        ("9.9.9.9:443", false),
        ("10.0.0.1:443", false),
        ("[::1]:443", false),
        ("[::ffff:8.8.8.8]:443", true),
        ("[::ffff:10.0.0.1]:443", false),
        ("[64:ff9b::808:808]:443", true),
        ("[64:ff9b::a00:1]:443", false),
        ("[64:ff9b::909:909]:443", false),
        ("[2002:808:808::1]:443", false),
        ("224.0.0.1:1", false),
    ] {
        assert_eq!(allows(&policy, to), allowed, "{to}");
    }
}

#[test]
fn rules_come_first_and_the_first_one_decides() {
    let rules = [
        "deny:10.0.0.1",
        "allow:10.0.0.0/8:5432",
        "allow:[fd00::/8]:443",
        "allow:9.9.9.9",
        "deny:0.0.0.0/0",
        "allow:2002::/16",
        "allow:64:ff9b:1::/48",
    ];
    let policy = Policy::parse(rules).unwrap();
    for (to, allowed) in [
        ("10.0.0.1:5432", false),
        ("10.0.0.2:5432", true),
        ("10.0.0.2:5433", false),
        ("[::ffff:10.0.0.2]:5432", true),
        ("[fd00::1]:443", true),
        ("[fd00::1]:80", false),
        // An operator may allow the host's own address.
        ("9.9.9.9:1", true),
        ("8.8.8.8:443", false),
        // Both the address and the one inside it are checked.
        ("[2002:808:808::1]:1", false),
        ("[2002:a00:2::1]:5432", true),
        ("[64:ff9b:1::a00:2]:5432", true),
        ("[64:ff9b:1::a00:1]:5432", false),
        ("[2606:4700::1111]:1", true),
    ] {
        assert_eq!(allows(&policy, to), allowed, "{to}");
    }
    let counts: Vec<(String, u64)> =
        policy.clone().counts().into_iter().map(|count| (count.rule, count.matched)).collect();
    let expected = [2, 4, 1, 1, 3, 1, 1_u64];
    assert!(counts.iter().map(|count| count.1).take(7).eq(expected), "{counts:?}");
    let rest = [("default allow".to_owned(), 1), ("default deny".to_owned(), 1)];
    assert_eq!(counts[7..], rest);
}

#[test]
fn guests_have_counters_of_their_own_and_one_of_all() {
    let policy = Policy::parse(["deny:8.8.8.8"]).unwrap();
    let guests = [policy.for_guest(), policy.for_guest()];
    for (guest, to) in [(0, "8.8.8.8:1"), (1, "8.8.8.8:1"), (1, "8.8.4.4:1"), (1, "10.0.0.1:1")] {
        allows(&guests[guest], to);
    }
    let counts = |policy: &Policy| policy.counts().iter().map(|count| count.matched).collect();
    let found: [Vec<u64>; 3] = [counts(&guests[0]), counts(&guests[1]), counts(&policy)];
    assert_eq!(found, [[1, 0, 0], [1, 1, 1], [2, 1, 1]].map(Vec::from));
}

#[test]
fn a_name_is_the_addresses_that_are_pinned_for_it() {
    let rules = ["deny:bad.example.com", "allow:*.example.com:443", "deny:0.0.0.0/0", "deny:::/0"];
    let policy = Policy::parse(rules).unwrap();
    let mut pins = policy.pins();
    pin(&mut pins, "api.example.com", &["8.8.8.8", "64:ff9b::808:404", "2606:4700::1111"]);
    pin(&mut pins, "bad.example.com", &["8.8.8.9"]);
    set_resolved(&mut pins, 0);
    for (to, allowed) in [
        ("8.8.8.8:443", true),
        ("[::ffff:8.8.8.8]:443", true),
        ("8.8.8.8:80", false),
        ("8.8.4.4:443", true),
        ("[64:ff9b::808:404]:443", true),
        // The IPv4 address alone is pinned.
        ("[64:ff9b::808:808]:443", false),
        ("[2606:4700::1111]:443", true),
        ("[2606:4700::1112]:443", false),
        ("8.8.8.10:443", false),
        // It is pinned for the other rule, too, which comes second.
        ("8.8.8.9:443", false),
    ] {
        let expected = if allowed { Decision::Allowed } else { Decision::Denied };
        assert_eq!(decide(&policy, &pins, to), expected, "{to}");
    }
}

/// The owner of a name does not open the host's networks with it.
#[test]
fn a_name_with_an_address_that_needs_a_rule_does_not_allow_it() {
    let inner = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "9.9.9.9", "::1", "fd00::1"];
    let decided = |rules: &[&str], ip: &str| {
        let policy = Policy::parse(rules.iter().copied()).unwrap();
        let mut pins = policy.pins();
        pin(&mut pins, "api.example.com", &inner);
        set_resolved(&mut pins, 0);
        let to = std::net::SocketAddr::new(ip.parse().unwrap(), 443);
        let decision = decide(&policy, &pins, &to.to_string());
        (decision, policy.counts().iter().map(|count| count.matched).collect::<Vec<_>>())
    };
    for ip in inner {
        let (decision, counts) = decided(&["allow:api.example.com"], ip);
        assert_eq!((decision, counts), (Decision::Denied, vec![0, 0, 1]), "{ip}");
        // A rule with its network does, before or after.
        for rules in [[ip, "api.example.com"], ["api.example.com", ip]] {
            let rules = rules.map(|rule| format!("allow:{rule}"));
            let (decision, _) = decided(&[&rules[0], &rules[1]], ip);
            assert_eq!(decision, Decision::Allowed, "{ip}");
        }
        // A rule that denies has no such exception.
        let allowed = format!("allow:{ip}");
        let (decision, counts) = decided(&["deny:api.example.com", &allowed], ip);
        assert_eq!((decision, counts), (Decision::Denied, vec![1, 0, 0, 0]), "{ip}");
    }
}

#[test]
fn names_are_resolved_when_a_decision_depends_on_them() {
    let unresolved = |rules: &[&str], to: &str| {
        let policy = Policy::parse(rules.iter().copied()).unwrap();
        let decision = decide(&policy, &policy.pins(), to);
        if let Decision::Unresolved(_) = decision {
            assert!(policy.counts().iter().all(|count| count.matched == 0), "{rules:?}");
        }
        decision
    };
    let to = "8.8.8.8:443";
    for (rules, expected) in [
        (&["allow:a.b", "deny:0.0.0.0/0"][..], Decision::Unresolved(vec![0])),
        (&["deny:a.b"], Decision::Unresolved(vec![0])),
        (&["deny:a.b", "allow:c.d", "deny:e.f"], Decision::Unresolved(vec![0, 2])),
        (&["deny:a.b", "allow:c.d", "deny:8.0.0.0/8"], Decision::Unresolved(vec![1])),
        // The decision is the same with and without the name.
        (&["allow:a.b"], Decision::Allowed),
        (&["deny:a.b", "deny:8.0.0.0/8"], Decision::Denied),
        // It comes too late, for another port, or cannot be resolved.
        (&["deny:8.0.0.0/8", "allow:a.b"], Decision::Denied),
        (&["deny:a.b:80"], Decision::Allowed),
        (&["deny:*.a.b"], Decision::Allowed),
    ] {
        assert_eq!(unresolved(rules, to), expected, "{rules:?}");
    }
    // No name opens it.
    assert_eq!(unresolved(&["allow:a.b"], "10.0.0.1:1"), Decision::Denied);
    // In the end it is decided with what is known.
    let policy = Policy::parse(["deny:a.b"]).unwrap();
    let pins = (&policy.pins(), Instant::now());
    assert_eq!(policy.decide(to.parse().unwrap(), pins, is_local, true), Decision::Allowed);
}

#[test]
fn a_rule_that_is_not_valid_is_refused_with_the_reason() {
    let error = |rule| Policy::parse([rule]).unwrap_err();
    for rule in ["", "allow", "permit:10.0.0.0/8", "10.0.0.0/8"] {
        assert!(matches!(error(rule), ParseRuleError::NoAction(text) if text == rule), "{rule}");
    }
    // An address inside another is compared as what it is.
    for rule in ["deny:[::ffff:8.8.8.8]", "deny:::ffff:0:0/96"] {
        assert!(matches!(error(rule), ParseRuleError::InvalidNetwork(_)), "{rule}");
    }
    for rule in ["allow:[::1]80", "allow:[::1]::80", "allow:[::1]:"] {
        assert!(matches!(error(rule), ParseRuleError::InvalidPort(_)), "{rule}");
    }
    for rule in ["allow:", "allow:10.0.0.0/33", "deny:[::1/129]", "deny:10.0.0/8", "allow:a/8"] {
        assert!(matches!(error(rule), ParseRuleError::InvalidNetwork(_)), "{rule}");
    }
    for (rule, expected) in [
        ("allow:all", NameError::OneLabel),
        ("deny:*", NameError::Star),
        ("deny:a..b:443", NameError::Label),
        ("allow:b\u{fc}cher.example", NameError::NotAscii),
        ("allow:api.example.com ", NameError::Character),
    ] {
        let error = error(rule);
        let found = matches!(&error, ParseRuleError::InvalidName(text, name)
            if text == rule && *name == expected);
        assert!(found, "{rule}: {error:?}");
    }
    for rule in ["allow:10.0.0", "allow:example.1", "allow:a.com/24", "deny:[a.com]"] {
        assert!(matches!(error(rule), ParseRuleError::InvalidNetwork(_)), "{rule}");
    }
    for rule in ["allow:a.com:0", "allow:a.com:https", "deny:*.a.com:"] {
        assert!(matches!(error(rule), ParseRuleError::InvalidPort(_)), "{rule}");
    }
    for rule in ["allow:10.0.0.1:0", "allow:10.0.0.1:65536", "allow:[::1]:x", "allow:10.0.0.1:"] {
        assert!(matches!(error(rule), ParseRuleError::InvalidPort(_)), "{rule}");
    }
    let valid = ["allow:::1", "deny:2001:db8::/32", "allow:[::1]", "allow:[::1]:80"];
    for rule in valid.into_iter().chain(["deny:*.Example.com.", "allow:api.example.com:443"]) {
        assert_eq!(Policy::parse([rule]).unwrap().counts()[0].rule, rule);
    }
}
