use proptest::prelude::{prop_assert, proptest};

use super::*;
use crate::testing::{sample, well_formed};

#[test]
fn a_picture_names_what_it_shows() {
    let mut results = sample("firecracker:readahead=on", "json-a", false);
    results.results.extend(sample("dram_cached", "json-a", false).results);
    results.results.extend(sample("firecracker:readahead=on", "pyaes-a", true).results);
    let svg = draw(&results);
    assert!(well_formed(&svg));
    for text in [
        ">firecracker:readahead=on<",
        ">dram_cached<",
        ">json-a: 10 pages, page cache cold, 2 microVMs together, 1 run<",
        ">pyaes-a: 10 pages, page cache cold, 2 microVMs together, oversubscribed, 1 run<",
        ">ms<",
        ">CPU ns per page<",
        "Some &lt;CPU&gt; &amp; more",
    ] {
        assert!(svg.contains(text), "{text}");
    }
    // Two panels: rows of one trace are in one.
    assert_eq!(svg.matches("page cache cold").count(), 2);
}

#[test]
fn a_planner_without_a_page_cache_is_in_the_panel_of_each_state() {
    let mut results = sample("reap", "json-a", false);
    for (planner, cache) in
        [("pass", Cache::Unused), ("firn", Cache::Unused), ("reap", Cache::Cached)]
    {
        let mut row = sample(planner, "json-a", false).results.remove(0);
        row.cache = cache;
        results.results.push(row);
    }
    let svg = draw(&results);
    assert_eq!(svg.matches("page cache ").count(), 2);
    for planner in [">reap<", ">pass<", ">firn<"] {
        assert_eq!(svg.matches(planner).count(), 2, "{planner}");
    }
}

#[test]
fn a_warm_invocation_has_a_bar_of_its_own() {
    let mut results = sample("reap", "json-a", false);
    results.results.extend(sample("firn", "pyaes-a", true).results);
    assert!(!draw(&results).contains("warm"));
    for row in &mut results.results {
        row.label = Some("b".to_owned());
        row.warm_ms = Some(row.total_ms);
    }
    let svg = draw(&results);
    assert!(well_formed(&svg));
    assert!(svg.contains(">reap (b), warm<") && svg.contains(">second invocation, warm<"), "{svg}");
    // The bars of oversubscribed runs are processor time.
    assert!(svg.contains(">firn (b)<") && !svg.contains(">firn (b), warm<"), "{svg}");
}

proptest! {
    #[test]
    fn any_names_and_values_make_a_picture(planner in ".{0,40}", trace in ".{0,40}", ms in 0.0..1e9_f64) {
        let mut results = sample(&planner, &trace, false);
        results.results[0].total_ms.p95 = ms;
        results.results[0].start_to_resume_ms.median = ms / 3.0;
        prop_assert!(well_formed(&draw(&results)));
    }
}
