use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const PLENTY: u64 = u64::MAX;

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// A burst of `count` arrivals at a time.
fn burst(forecast: &mut Forecast<&'static str>, key: &'static str, count: usize, at: f64) {
    (0..count).for_each(|_| forecast.arrived(&key, seconds(at)));
}

#[test]
fn as_many_as_the_last_burst_had_are_kept_ready() {
    let mut forecast = Forecast::default();
    assert_eq!(forecast.wanted(seconds(0.0), PLENTY), []);
    burst(&mut forecast, "json", 32, 1.0);
    assert_eq!(forecast.wanted(seconds(1.5), PLENTY), [("json", 32)]);
    // A smaller burst soon after does not lower it.
    burst(&mut forecast, "json", 4, 10.0);
    assert_eq!(forecast.wanted(seconds(10.0), PLENTY), [("json", 32)]);
}

#[test]
fn requests_that_come_one_after_the_other_need_one_clone() {
    let mut forecast = Forecast::default();
    (0..100).for_each(|second| burst(&mut forecast, "json", 1, f64::from(second)));
    assert_eq!(forecast.wanted(seconds(99.0), PLENTY), [("json", 1)]);
}

#[test]
fn a_forecast_decays_and_ends() {
    let mut forecast = Forecast::default();
    burst(&mut forecast, "json", 32, 0.0);
    let half_life = HALF_LIFE.as_secs_f64();
    for (half_lives, count) in [(1.0, 16), (2.0, 8), (5.0, 1), (7.9, 1)] {
        let wanted = forecast.wanted(seconds(half_lives * half_life), PLENTY);
        assert_eq!(wanted, [("json", count)], "{half_lives}");
    }
    assert_eq!(forecast.wanted(seconds(8.1 * half_life), PLENTY), []);
    assert!(forecast.snapshots.is_empty());
}

#[test]
fn the_bytes_go_to_the_clones_of_the_largest_value() {
    let mut forecast = Forecast::default();
    burst(&mut forecast, "rare", 2, 0.0);
    (0..50).for_each(|at| burst(&mut forecast, "often", 2, f64::from(at) * 2.0));
    let now = seconds(100.0);
    forecast.measured(&"rare", 16 * MIB);
    forecast.measured(&"often", 16 * MIB);
    assert_eq!(forecast.wanted(now, 32 * MIB), [("often", 2)]);
    // Each byte of the other is worth more, if it takes few.
    forecast.measured(&"often", 1024 * MIB);
    assert_eq!(forecast.wanted(now, 1024 * MIB), [("rare", 2)]);
    // The least valuable clone is removed, not the snapshot.
    forecast.measured(&"often", 16 * MIB);
    assert_eq!(forecast.wanted(now, 48 * MIB), [("often", 2), ("rare", 1)]);
    assert_eq!(forecast.wanted(now, 0), []);
}

#[test]
fn a_snapshot_that_is_gone_has_no_forecast() {
    let mut forecast = Forecast::default();
    burst(&mut forecast, "old", 3, 0.0);
    burst(&mut forecast, "new", 1, 0.0);
    forecast.forget(|key| *key == "old");
    assert_eq!(forecast.wanted(seconds(0.0), PLENTY), [("new", 1)]);
    // A measurement that comes late brings nothing back.
    forecast.measured(&"old", MIB);
    assert_eq!(forecast.wanted(seconds(0.0), PLENTY), [("new", 1)]);
}

proptest! {
    #[test]
    fn bytes_are_bounded_and_no_more_are_kept_than_came_at_once(
        arrivals in prop::collection::vec((0u8..5, 0u64..3000), 0..200),
        sizes in prop::collection::vec(1u64..100, 5),
        budget in 0u64..400,
    ) {
        let mut forecast = Forecast::default();
        let mut now = Duration::ZERO;
        let mut times: Vec<Vec<Duration>> = vec![Vec::new(); 5];
        for (key, pause) in &arrivals {
            now += Duration::from_millis(*pause);
            forecast.arrived(key, now);
            times[usize::from(*key)].push(now);
        }
        for (key, size) in (0u8..).zip(&sizes) {
            forecast.measured(&key, size * MIB);
        }
        let wanted = forecast.wanted(now, budget * MIB);
        let bytes: u64 = wanted
            .iter()
            .map(|(key, count)| sizes[usize::from(*key)] * *count as u64)
            .sum();
        prop_assert!(bytes <= budget);
        for (key, count) in &wanted {
            let times = &times[usize::from(*key)];
            let at_once = |begin: &Duration| {
                times.iter().filter(|time| *time >= begin && **time - *begin < WINDOW).count()
            };
            let most = times.iter().map(at_once).max().unwrap_or_default();
            prop_assert!((1..=most).contains(count), "{count} of {most}");
        }
        // Without a bound, every snapshot that was requested lately has a clone.
        let all = forecast.wanted(now, PLENTY);
        let requested = times.iter().filter(|times| !times.is_empty()).count();
        prop_assert_eq!(all.len(), requested);
        // And none for ever.
        prop_assert_eq!(forecast.wanted(now + HALF_LIFE * 20, PLENTY), []);
    }
}
