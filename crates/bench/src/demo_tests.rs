use super::{Demo, DemoRow, demo_rows};
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

#[test]
fn a_repeated_planner_is_shown_once() {
    let mut rows = sample("reap", "t", false).results;
    let mut again = rows[0].clone();
    rows[0].label = Some("a".to_owned());
    again.label = Some("b".to_owned());
    again.total_ms.median *= 2.0;
    let median_ms = rows[0].total_ms.median;
    rows.push(again);
    let medians: Vec<f64> = demo_rows(rows).map(|row| row.median_ms).collect();
    assert_eq!(medians, [median_ms]);
}
