use firn_run::{ReplicaCost, StartReport};

use super::*;

/// A start that took `ms` to its last touch.
fn start(ms: u64) -> StartReport {
    let mut report = StartReport::default();
    report.times.replay_ns = Some(ms * 1_000_000);
    report
}

#[test]
fn the_tail_is_compared_with_the_idle_median() {
    let starts: Vec<StartReport> = (1..=100).map(start).collect();
    let open = OpenLoop::of(&starts, 50.0).unwrap();
    assert_eq!((open.starts, open.fallbacks), (100, 0));
    assert_eq!(open.p95_to_idle_median, open.total_ms.p95 / 50.0);
    assert!((94.0..=97.0).contains(&open.total_ms.p95), "{:?}", open.total_ms);
    assert_eq!(OpenLoop::of(&[], 50.0), None);
}

#[test]
fn a_start_that_found_nothing_ready_is_a_fallback() {
    let waited = ReplicaCost { imaging_ns: 1, ..ReplicaCost::default() };
    let ready = ReplicaCost { ready: true, ..ReplicaCost::default() };
    let starts = [
        StartReport { standby: Some(StandbyUse::Hit), replica: Some(ready), ..start(1) },
        StartReport { standby: Some(StandbyUse::Miss), ..start(1) },
        StartReport { replica: Some(waited), ..start(1) },
    ];
    assert_eq!(OpenLoop::of(&starts, 1.0).unwrap().fallbacks, 2);
}
