use firn_net::Policy;
use uuid::Uuid;

use super::{Metrics, Outcome};

fn line(metrics: &Metrics, function: &str) -> Option<String> {
    let label = format!("function=\"{function}\",ending=\"answered\"");
    metrics.text().lines().find(|line| line.contains(&label)).map(ToOwned::to_owned)
}

#[test]
fn the_counters_of_a_function_go_with_it() {
    let metrics = Metrics::default();
    let ids: Vec<Uuid> = (0..100).map(|_| Uuid::new_v4()).collect();
    for (number, id) in ids.iter().enumerate() {
        let name = format!("function-{number}");
        for ending in Outcome::ALL {
            metrics.ended(&name, *id, ending, || true);
        }
        if number != 7 {
            metrics.deleted(&name, *id);
            // A request that began before.
            metrics.ended(&name, *id, Outcome::answered, || false);
        }
    }
    let text = metrics.text();
    assert_eq!(text.matches("function-").count(), Outcome::ALL.len(), "{text}");
    assert_eq!(text.matches("function-7\"").count(), Outcome::ALL.len(), "{text}");
    assert_eq!(metrics.counted.lock().len(), 1, "nothing is kept of deleted functions");
}

#[test]
fn a_new_function_of_the_name_counts_from_zero() {
    let metrics = Metrics::default();
    let [old, new] = [Uuid::new_v4(), Uuid::new_v4()];
    let ended = |id, exists| metrics.ended("f", id, Outcome::answered, || exists);
    ended(old, true);
    ended(old, true);
    // The daemon has deleted the function and created another, and hears of the deletion last.
    ended(new, true);
    metrics.deleted("f", old);
    ended(old, false);
    ended(new, true);
    assert!(line(&metrics, "f").unwrap().ends_with(" 2"), "{}", metrics.text());
    metrics.deleted("f", new);
    assert_eq!(line(&metrics, "f"), None);
}

/// A rule is a label, so there are as many as the operator has given.
#[test]
fn each_rule_of_the_network_has_a_counter() {
    let rules =
        ["allow:*.example.com:443", "deny:[fd00::/8]:1", "deny:0.0.0.0/0", "deny:0.0.0.0/0"];
    let policy = Policy::parse(rules).unwrap();
    let text = Metrics::new(Some(policy)).text();
    for rule in rules.into_iter().chain(["default allow", "default deny"]) {
        let line = format!("firn_egress_connections_total{{rule=\"{rule}\"}} 0\n");
        assert_eq!(text.matches(&line).count(), 1, "{rule}: {text}");
    }
    assert!(text.ends_with("# EOF\n"), "{text}");
    assert!(!Metrics::new(None).text().contains("egress"));
}
