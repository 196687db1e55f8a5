use super::{draw_sessions as draw, sessions_markdown};
use crate::cache::Cache;
use crate::stats::{Comparison, Summary};
use crate::testing::sample;
use crate::thaw::{Noise, Results};

/// The tables without the padding of their cells.
fn markdown(sessions: &[Results]) -> String {
    let text = sessions_markdown(sessions);
    let lines = text.lines().map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let line = words.join(" ");
        if line.starts_with("|-") {
            "|---".repeat(line.matches('|').count() - 1) + "|"
        } else {
            line
        }
    });
    lines.map(|line| line + "\n").collect()
}

/// A session of two microVMs on a cold page cache.
fn session(planners: &[&str], trace: &str, ms: f64, dense: bool, unsanitised: bool) -> Results {
    let mut results = sample(planners[0], trace, false);
    results.results =
        planners.iter().map(|planner| sample(planner, trace, false).results.remove(0)).collect();
    for row in &mut results.results {
        row.total_ms = Summary::of(&[ms]).unwrap();
        row.batch_dram_bytes = 3 << 20;
        if row.planner == "pass" {
            row.cache = Cache::Unused;
        }
    }
    Results { dense, unsanitised, ..results }
}

#[test]
fn planners_are_columns_and_traces_are_rows() {
    let mut other = session(&["reap"], "u", 20.0, true, true);
    other.results[0].batch_free_read_bytes = Some(5 << 20);
    let text = markdown(&[session(&["pass", "reap"], "t", 10.0, true, true), other]);
    let expected = "## 2 microVMs of one snapshot, page cache cold; dense images, unsanitised guest\n\n\
                    Request to last page, ms:\n\n| trace | `pass` | `reap` |\n|---|---|---|\n| t | 10.0 | 10.0 |\n| u | | 20.0 |\n\n\
                    DRAM of all microVMs, MiB:\n\n| trace | `pass` | `reap` |\n|---|---|---|\n| t | 3.00 | 3.00 |\n| u | | 3.00 |\n\n\
                    Read of free pages, MiB:\n\n| trace | `reap` |\n|---|---|\n| u | 5.00 |\n\n";
    assert_eq!(text, expected);
}

#[test]
fn a_later_row_replaces_an_earlier_one() {
    let of = |ms| session(&["reap"], "t", ms, false, false);
    let text = markdown(&[of(1.0), of(2.0)]);
    assert!(text.contains("| t | 2.00 |") && !text.contains("| t | 1.00 |"), "{text}");
}

#[test]
fn a_planner_without_a_page_cache_is_in_the_tables_of_all_its_states() {
    let mut both = session(&["pass", "reap"], "t", 1.0, true, true);
    let mut cached = both.results[1].clone();
    cached.cache = Cache::Cached;
    cached.total_ms = Summary::of(&[2.0]).unwrap();
    both.results.push(cached);
    let text = markdown(&[both]);
    let (cold, cached) = text.split_once("page cache cached").unwrap();
    assert!(cold.contains("| `pass` | `reap` |") && cold.contains("| t | 1.00 | 1.00 |"), "{text}");
    assert!(cached.contains("| t | 1.00 | 2.00 |"), "{text}");
}

#[test]
fn the_picture_shows_ratios_to_firecracker() {
    let traces = [("t", 10.0), ("u", 40.0)];
    let sessions: Vec<Results> = traces
        .into_iter()
        .flat_map(|(trace, ms)| {
            let firecracker = session(&["firecracker:readahead=on"], trace, ms, true, true);
            [firecracker, session(&["reap"], trace, 20.0, true, true)]
        })
        .collect();
    // Ratios of 2 and 0.5; 3 MiB of 3 MiB.
    let picture = draw(&sessions);
    assert!(picture.contains("1.25 (0.88 to 1.62)"), "{picture}");
    assert!(picture.contains("1.00 (1.00 to 1.00)"), "{picture}");
    assert!(picture.contains("Request to last page: 2 microVMs"), "{picture}");
    // Without Firecracker there is nothing to compare with.
    assert!(!draw(&[session(&["reap"], "t", 1.0, true, true)]).contains("relative to firecracker"));
}

#[test]
fn warm_invocations_are_columns_and_bars_beside_cold_ones() {
    let mut base = session(&["firecracker:readahead=on", "reap"], "t", 20.0, true, true);
    base.results[0].warm_ms = Summary::of(&[5.0]);
    let text = markdown(&[base.clone()]);
    let times = "| trace | `firecracker:readahead=on` | `firecracker:readahead=on`, warm | `reap` |\n\
                 |---|---|---|---|\n| t | 20.0 | 5.00 | 20.0 |";
    assert!(text.contains(times), "{text}");
    // Bytes are those of the first invocation.
    assert!(text.contains("| trace | `firecracker:readahead=on` | `reap` |"), "{text}");
    let picture = draw(&[base]);
    assert!(picture.contains(">firecracker:readahead=on, warm<"), "{picture}");
    assert!(picture.contains("0.25 (0.25 to 0.25)"), "{picture}");
    assert_eq!(picture.matches("warm<").count(), 1, "{picture}");
}

#[test]
fn a_time_has_its_interval() {
    let mut few = session(&["reap"], "t", 1.0, true, true);
    few.results[0].total_ms = Summary::of_runs(&[vec![3.0], vec![1.0], vec![2.0]]).unwrap();
    assert!(markdown(&[few.clone()]).contains("| t | 2.00 (1.00 to 3.00) |"));
    let runs = [5.0, 7.0].repeat(10);
    let runs: Vec<Vec<f64>> = runs.into_iter().chain([100.0, 6.0]).map(|ms| vec![ms]).collect();
    few.results[0].total_ms = Summary::of_runs(&runs).unwrap();
    let text = markdown(&[few]);
    assert!(text.contains("| t | 6.50 (5.00 to 7.00) |"), "{text}");
}

#[test]
fn a_repeated_planner_is_shown_as_noise() {
    let mut all = session(&["reap", "pass"], "t", 1.0, true, true);
    let mut again = all.results[0].clone();
    all.results[0].label = Some("a".to_owned());
    again.label = Some("b".to_owned());
    again.total_ms = Summary::of(&[9.0]).unwrap();
    all.results.push(again);
    let noise = |cache, ratio| Noise {
        planner: "reap".to_owned(),
        trace: "t".to_owned(),
        cache,
        of: "total_ms".to_owned(),
        ratio: Comparison::of(&[ratio]).unwrap(),
    };
    all.noise = vec![noise(Cache::Cold, 1.25), noise(Cache::Cached, 4.0)];
    let mut other = Results { noise: vec![noise(Cache::Cold, 0.75)], ..all.clone() };
    let text = markdown(&[all.clone(), other.clone()]);
    assert!(text.contains("| t | 1.00 | 1.00 |") && !text.contains("9.00"), "{text}");
    let twice =
        "Noise: a planner measured twice, second / first, 2 times: median 1.000, 0.750 to 1.250.";
    assert!(text.contains(twice), "{text}");
    other.results[0].concurrency = 7;
    let text = markdown(&[all, other]);
    assert!(text.contains("1 times: median 0.750") && text.contains("1 times: median 1.250"));
}
