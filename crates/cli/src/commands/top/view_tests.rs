use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;
use crate::commands::top::screen;

fn status(requests: u64) -> DaemonStatus {
    let version = |name: &str, requests: u64| {
        serde_json::json!({
            "function": name, "version": "1", "starting": 1, "publishing": 1, "busy": 3, "idle": 4, "ending": 0,
            "private": 5 << 20, "shared": 6 << 20, "requests": requests, "function_errors": 1, "throttled": 2, "failed": 1,
            "cold": 0, "thawed": 7, "warm": 8,
            "latency": { "thawed": { "count": 7, "p50_ns": 12_300_000, "p99_ns": 20_000_000 } },
        })
    };
    serde_json::from_value(serde_json::json!({
        "uptime_ns": 3_723_000_000_000_u64, "queued": 9,
        "memory": { "limit": 1 << 30, "private_booked": 20 << 20, "shared_booked": 6 << 20, "private": 5 << 20, "shared": 6 << 20 },
        "monitors": { "limit": 256, "running": 9, "standby": 2 },
        "versions": [version("quiet", 5), version("busy", requests)],
    }))
    .unwrap()
}

fn view() -> View {
    let before = Instant::now().checked_sub(Duration::from_secs(2)).unwrap();
    View::of("http://here", Some(&(status(100), before)), status(300))
}

#[test]
fn rates_cover_the_time_since_the_previous_status() {
    let view = view();
    assert_eq!(view.version_requests_per_second[0], 0.0);
    let rate = view.version_requests_per_second[1];
    assert!((50.0..=100.0).contains(&rate) && rate == view.requests_per_second, "{rate}");
    let restarted = View::of("x", Some(&(status(100), Instant::now())), status(5));
    assert_eq!(
        restarted.requests_per_second, 0.0,
        "the counters of a restarted daemon start at zero"
    );
    assert_eq!(View::of("x", None, status(5)).requests_per_second, 0.0);
}

#[test]
fn text_and_json_contain_the_important_values() {
    let text = view().text();
    for word in
        ["up 1:02:03", "9 of 256 microVMs, 2 standby monitors", "9 waiting", "12.3 ms", "5.0 MiB"]
    {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(text.find("busy ").unwrap() < text.find("quiet").unwrap(), "the busiest first: {text}");
    let json = serde_json::to_value(view()).unwrap();
    assert_eq!(json["versions"][1]["latency"]["thawed"]["p50_ns"], 12_300_000);
    assert!(json["requests_per_second"].is_number());
}

#[test]
fn a_terminal_displays_the_view_and_the_last_error() {
    let mut terminal = Terminal::new(TestBackend::new(160, 8)).unwrap();
    let view = view();
    terminal.draw(|frame| screen::draw(frame, &view, Some("no daemon\u{1b}[2J answers"))).unwrap();
    let buffer = terminal.backend().buffer();
    let lines: Vec<String> = buffer
        .content()
        .chunks(160)
        .map(|line| line.iter().map(ratatui::buffer::Cell::symbol).collect())
        .collect();
    assert!(lines[0].starts_with("firn at http://here, up 1:02:03"), "{lines:#?}");
    assert!(lines[2].starts_with("no daemon[2J answers"), "{lines:#?}");
    assert!(lines[3].starts_with("function  version  start  busy"), "{lines:#?}");
    assert!(lines[4].starts_with("busy      1        2      3"), "{lines:#?}");
    assert!(lines[5].starts_with("quiet"), "{lines:#?}");
}
