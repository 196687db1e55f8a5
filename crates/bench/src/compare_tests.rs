use std::fs;

use tempfile::TempDir;

use super::*;
use crate::testing::{head, run, sample};
use crate::thaw::{RowHead, Run};

/// Milliseconds of the sample's start that are not replay.
const STARTING: f64 = 0.053_321;

/// A session that measured `pass` and, twice, Firecracker on a trace, with these replays of `pass`
/// in µs. Firecracker's measurements have the noise 10 %.
fn session(replays: &[u64]) -> Results {
    let mut results = sample("reap", "t", false);
    results.results.clear();
    let runs = |replays: &[u64]| -> Vec<Run> {
        replays.iter().map(|micros| run(&[micros * 1000])).collect()
    };
    let row = |planner: &str, label: Option<&str>, runs: &[Run]| {
        let head = RowHead { planner: planner.to_owned(), ..head(label, false) };
        Row::of(head, runs).unwrap()
    };
    let (a, b) = (runs(&[10_000; 11]), runs(&[11_005; 11]));
    results.results.push(row("pass", None, &runs(replays)));
    results.results.push(row("firecracker", Some("a"), &a));
    results.results.push(row("firecracker", Some("b"), &b));
    results.noise.extend(Noise::of(&head(Some("b"), false), &a, &b));
    results
}

/// Replays around `micros`, up to 1 % off.
fn around(micros: u64, runs: u64) -> Vec<u64> {
    (0..runs).map(|run| micros + micros * (run * 7 % 11) / 500 - micros / 100).collect()
}

/// The comparison of two files.
fn compare(old: &Results, new: &Results) -> Result<Compared, CompareError> {
    let folder = tempfile::tempdir().unwrap();
    let read = |name, results| Measured::read(&written(&folder, name, results)).unwrap();
    Compared::of(&read("old.json", old), &read("new.json", new))
}

fn written(folder: &TempDir, name: &str, results: &impl Serialize) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, serde_json::to_string(results).unwrap()).unwrap();
    path
}

fn verdict(old: &[u64], new: &[u64]) -> Verdict {
    let compared = compare(&session(old), &session(new)).unwrap();
    assert_eq!(compared.rows.len(), 2, "the repeated planner is not compared");
    assert_eq!(compared.rows[1].verdict, Verdict::Noise);
    assert_eq!(compared.has_regression(), compared.rows[0].verdict == Verdict::Regression);
    compared.rows[0].verdict
}

#[test]
fn only_what_exceeds_the_noise_is_a_regression() {
    let base = around(20_000, 11);
    assert_eq!(verdict(&base, &base), Verdict::Noise);
    // The intervals do not overlap, and the noise floor is 1.1.
    assert_eq!(verdict(&base, &around(21_600, 11)), Verdict::Noise);
    assert_eq!(verdict(&base, &around(24_000, 11)), Verdict::Regression);
    assert_eq!(verdict(&base, &around(16_000, 11)), Verdict::Gain);
    // The medians differ by half, and the intervals overlap.
    let wide = |factor: u64| -> Vec<u64> { (1..=11).map(|run| run * factor).collect() };
    assert_eq!(verdict(&wide(4_000), &wide(6_000)), Verdict::Noise);
    assert_eq!(verdict(&base, &around(40_000, 4)), Verdict::TooFewRuns);
    assert_eq!(verdict(&around(20_000, 5), &around(40_000, 5)), Verdict::Regression);
    let mut outlier = around(24_000, 5);
    outlier[2] = 20_000;
    assert_eq!(verdict(&around(20_000, 5), &outlier), Verdict::Noise, "minimum to maximum");
}

#[test]
fn a_ratio_has_its_interval_and_both_sessions_noise() {
    let old = session(&around(20_000, 11));
    let mut new = session(&around(30_000, 12));
    new.noise.clear();
    let row = &new.results[1];
    let spread: Vec<Run> = [900, 1000, 2000].map(|ns| run(&[ns * 1000])).into();
    let same: Vec<Run> = [1000, 1000, 1000].map(|ns| run(&[ns * 1000])).into();
    let head = RowHead { trace: row.trace.clone(), ..head(Some("b"), false) };
    new.noise.extend(Noise::of(&head, &spread, &same));
    let compared = compare(&old, &new).unwrap();
    let row = &compared.rows[0];
    let (before, after) = (old.results[0].total_ms, new.results[0].total_ms);
    assert_eq!((row.of, row.ratio), ("total_ms", after.median / before.median));
    let [low, high] = row.interval;
    assert!(1.45 < low && low <= row.ratio && row.ratio <= high && high < 1.55, "{low} to {high}");
    // The farther end: 2.0 + STARTING divided by 1.0 + STARTING, of the second session.
    let noise = (2.0 + STARTING) / (1.0 + STARTING);
    assert!((row.noise - noise).abs() < 1e-6, "{} {noise}", row.noise);
    assert_eq!(row.verdict, Verdict::Noise);
    let few = compare(&session(&around(20_000, 5)), &session(&around(30_000, 5))).unwrap();
    let [low, high] = few.rows[0].interval;
    assert_eq!(low, few.rows[0].new.min / few.rows[0].old.max);
    assert_eq!(high, few.rows[0].new.max / few.rows[0].old.min);
}

#[test]
fn other_hosts_and_other_ways_are_refused() {
    let old = session(&around(20_000, 11));
    let refused = |change: &dyn Fn(&mut Results)| {
        let mut new = old.clone();
        change(&mut new);
        compare(&old, &new).unwrap_err().to_string()
    };
    let text = refused(&|new| new.host.kernel = "6.18".to_owned());
    assert!(text.contains("kernel \"6.12\" and \"6.18\""), "{text}");
    let text = refused(&|new| new.dense = true);
    assert!(text.contains("dense \"false\" and \"true\""), "{text}");
    let text = refused(&|new| new.results[0].touches += 1);
    assert!(text.contains("pass on t, page cache cold: 11 touches of 10 pages and 12"), "{text}");
    let text = refused(&|new| new.noise.clear());
    assert!(text.contains("new.json measured no planner twice"), "{text}");
    let text = refused(&|new| new.results.iter_mut().for_each(|row| row.cache = Cache::Cached));
    assert!(text.contains("in common"), "{text}");
    let mut lab = old.clone();
    lab.host.kvm = KvmKind::Lab;
    assert!(matches!(compare(&lab, &lab), Err(CompareError::Lab(_))));
    // A build is what changes.
    let mut new = old.clone();
    new.host.commit = "1234567".to_owned();
    assert!(compare(&old, &new).is_ok());
}

#[test]
fn rows_of_one_result_are_named() {
    let old = session(&around(20_000, 11));
    let mut new = session(&around(24_000, 11));
    new.results[1].planner = "reap".to_owned();
    let compared = compare(&old, &new).unwrap();
    assert_eq!(compared.unmatched.len(), 2);
    let text = compared.text();
    assert!(text.contains("not in both: reap on t, page cache cold in"), "{text}");
    assert!(text.contains("1 rows: 1 regressions, 0 gains, 0 within the noise, 0 of too few runs"));
    assert!(text.contains("REGRESSION") && text.contains("1.199 (1.190 to 1.211)"), "{text}");
    let json = serde_json::to_value(&compared).unwrap();
    assert_eq!(json["rows"][0]["verdict"], "regression");
}

#[test]
fn a_papers_places_are_compared_one_by_one() {
    let of = |micros| {
        let Results { host, results: rows, noise, .. } = session(&around(micros, 11));
        let place = |name: &str| Place {
            name: name.to_owned(),
            rows: rows.iter().filter(|row| !row.is_repeated()).cloned().collect(),
            noise: noise.clone(),
        };
        Outcome {
            version: 1,
            name: "figure".to_owned(),
            source: String::new(),
            title: String::new(),
            quantity: crate::paper::Quantity::Total,
            host,
            pool_size: None,
            unsanitised: false,
            order: 1,
            command: String::new(),
            settings: crate::paper::Settings::default(),
            measured: Vec::new(),
            sessions: vec![place("1"), place("8")],
            remarks: Vec::new(),
            budgets: Vec::new(),
            costs: Vec::new(),
            programs: Vec::new(),
            kernel_faults: Vec::new(),
            left_out: std::collections::BTreeMap::new(),
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let read = |outcome| Measured::read(&written(&folder, "r.json", &outcome)).unwrap();
    let (old, mut new) = (of(20_000), of(20_000));
    new.sessions[1].rows = of(40_000).sessions[1].rows.clone();
    let (old, new) = (read(old), read(new));
    let compared = Compared::of(&old, &new).unwrap();
    let verdicts: Vec<_> = compared.rows.iter().map(|row| (&*row.place, row.verdict)).collect();
    let (noise, regression) = (Verdict::Noise, Verdict::Regression);
    assert_eq!(verdicts, [("1", noise), ("1", noise), ("8", regression), ("8", noise)]);
    let session = Measured::read(&written(&folder, "s.json", &session(&[1; 11]))).unwrap();
    let text = Compared::of(&old, &session).unwrap_err().to_string();
    assert!(text.contains("\"firn bench paper figure\" and \"firn bench thaw\""), "{text}");
}

#[test]
fn a_later_version_and_other_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut results = session(&[1; 11]);
    results.version = 2;
    let error = Measured::read(&written(&folder, "later.json", &results)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("version 2") && text.contains("up to 1"), "{text}");
    let error = Results::read(&written(&folder, "later.json", &results)).unwrap_err();
    assert!(matches!(error, ReadResultsError::Version { found: 2, .. }));
    let error = Measured::read(&written(&folder, "other.json", &vec![1])).unwrap_err();
    assert!(matches!(error, ReadResultsError::Results { .. }), "{error}");
    // Files from before the versions have no measurements and no noise.
    let mut before = serde_json::to_value(session(&[1; 11])).unwrap();
    before.as_object_mut().unwrap().remove("version");
    assert_eq!(Results::read(&written(&folder, "before.json", &before)).unwrap().version, 0);
}
