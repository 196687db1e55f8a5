use super::{Demo, DemoRow};
use crate::testing::sample;

#[test]
fn the_table_has_a_row_for_each_planner_and_a_column_for_each_trace() {
    let row = |trace: &str, planner: &str, in_pool| DemoRow {
        trace: trace.to_owned(),
        planner: planner.to_owned(),
        in_pool,
        median_ms: 12.34,
        min_ms: 1.0,
        max_ms: 123.4,
    };
    let demo = Demo {
        host: sample("pass", "t", false).host,
        runs: 3,
        rows: vec![row("t", "reap", false), row("u", "reap", false), row("u", "pass", true)],
    };
    let text = demo.text();
    let line = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap();
    assert!(line("│ planner").contains(" t ") && line("│ planner").contains(" u "), "{text}");
    assert_eq!(line("│ reap").matches("12.3 (1.00 to 123)").count(), 2, "{text}");
    assert_eq!(line("│ pass").matches("12.3 (1.00 to 123)").count(), 1, "{text}");
    assert!(line("│ pass").contains("pool in memory"), "{text}");
}
