use super::{Metrics, Outcome};

#[test]
fn the_counters_of_a_function_go_with_it() {
    let metrics = Metrics::default();
    for number in 0..100 {
        let name = format!("function-{number}");
        metrics.created(&name);
        Outcome::ALL.iter().for_each(|ending| metrics.ended(&name, *ending));
        if number != 7 {
            metrics.deleted(&name);
            // A request that began before.
            metrics.ended(&name, Outcome::answered);
        }
    }
    let text = metrics.text();
    assert_eq!(text.matches("function-").count(), Outcome::ALL.len(), "{text}");
    assert_eq!(text.matches("function-7\"").count(), Outcome::ALL.len(), "{text}");

    // A new function of the name counts from zero.
    metrics.created("function-8");
    metrics.ended("function-8", Outcome::answered);
    let text = metrics.text();
    let line = text.lines().find(|line| line.contains("function-8\"")).unwrap();
    assert!(line.ends_with(" 1"), "{line}");
}
