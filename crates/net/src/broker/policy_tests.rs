use std::net::SocketAddr;

use super::{ParseRuleError, Policy};

fn allows(policy: &Policy, to: &str) -> bool {
    policy.check(to.parse::<SocketAddr>().unwrap(), |address| address.to_string() == "9.9.9.9")
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
    for rule in ["allow:10.0.0.1:0", "allow:10.0.0.1:65536", "allow:[::1]:x", "allow:10.0.0.1:"] {
        assert!(matches!(error(rule), ParseRuleError::InvalidPort(_)), "{rule}");
    }
    for rule in ["allow:::1", "deny:2001:db8::/32", "allow:[::1]", "allow:[::1]:80"] {
        assert_eq!(Policy::parse([rule]).unwrap().counts()[0].rule, rule);
    }
}
