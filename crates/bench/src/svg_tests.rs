use proptest::prelude::{prop_assert, proptest};

use super::*;
use crate::testing::sample;

/// Whether every element is closed in order, every attribute is quoted, and every `&` begins an entity.
fn well_formed(svg: &str) -> bool {
    let mut open = Vec::new();
    let mut rest = svg;
    while let Some(at) = rest.find('<') {
        let (text, tag) = rest.split_at(at);
        let Some(end) = tag.find('>') else { return false };
        let (tag, behind) = (&tag[1..end], &tag[end + 1..]);
        if text.contains('>') || !entities(text) || !entities(tag) || tag.contains('<') {
            return false;
        }
        if let Some(name) = tag.strip_prefix('/') {
            if open.pop() != Some(name) {
                return false;
            }
        } else {
            if tag.matches('"').count() % 2 != 0 {
                return false;
            }
            if !tag.ends_with('/') {
                open.push(tag.split(' ').next().unwrap_or_default());
            }
        }
        rest = behind;
    }
    open.is_empty() && rest.trim().is_empty() && !svg.contains("NaN") && !svg.contains("inf")
}

fn entities(text: &str) -> bool {
    text.split('&')
        .skip(1)
        .all(|part| ["lt;", "gt;", "amp;", "quot;"].iter().any(|entity| part.starts_with(entity)))
}

#[test]
fn the_check_finds_what_is_wrong() {
    assert!(well_formed("<a x=\"1\"><b/>t &amp; u</a>"));
    for wrong in ["<a>", "<a></b>", "<a>&</a>", "<a x=\"1></a>", "<a>></a>", "<a", "<a></a>x"] {
        assert!(!well_formed(wrong), "{wrong}");
    }
}

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
fn ticks_are_few_and_round() {
    for (longest, step) in [(10.0, 2.0), (1.0, 0.2), (43.0, 10.0), (99.0, 20.0), (0.0, 1.0)] {
        assert!((tick(longest) - step).abs() < 1e-12, "{longest}: {}", tick(longest));
    }
    assert_eq!([0.0, 1.234, 12.34, 123.4].map(number), ["0", "1.23", "12.3", "123"]);
}

proptest! {
    #[test]
    fn any_names_and_values_make_a_picture(planner in ".{0,40}", trace in ".{0,40}", ms in 0.0..1e9_f64) {
        let mut results = sample(&planner, &trace, false);
        results.results[0].total_ms.p95 = ms;
        results.results[0].start_to_resume_ms.median = ms / 3.0;
        prop_assert!(well_formed(&draw(&results)));
        let step = tick(ms);
        prop_assert!(ms == 0.0 || (3.9..=10.1).contains(&(ms / step)));
    }
}
