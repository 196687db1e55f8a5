use super::{details, summary};
use crate::demo::scenario::{Cost, Scenario, Start};

fn start(name: &str, parts: &[(&str, u64)], pages: Option<u64>) -> Start {
    let cost = pages.map(|guest_pages| Cost {
        guest_pages,
        kvm_faults: 5,
        read_bytes: 0,
        private_bytes: 3 << 20,
        shared_bytes: 0,
    });
    Start {
        name: name.to_owned(),
        parts: parts.iter().map(|(name, ns)| ((*name).to_owned(), *ns)).collect(),
        total_ns: parts.iter().map(|(_, ns)| ns).sum(),
        cost,
    }
}

fn scenario() -> Scenario {
    Scenario {
        function: "hello".to_owned(),
        freezes: Vec::new(),
        thaws: 3,
        starts: vec![
            start("cold boot", &[("boot Linux", 3_000_000), ("first response", 1_000_000)], None),
            start("thaw", &[("load", 2_000_000), ("first response", 1_500_000)], Some(77)),
        ],
    }
}

#[test]
fn every_part_is_a_row_and_the_response_comes_after_all_other_parts() {
    let text = details(&scenario());
    let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what} is missing: {text}"));
    assert!(at("boot Linux") < at("first response"));
    assert!(at("load") < at("first response"));
    assert!(at("first response") < at("total"));
    for cell in ["3.0 ms", "3.5 ms", "77", "3.0 MiB"] {
        at(cell);
    }
}

#[test]
fn the_summary_has_a_row_for_each_kind_and_a_column_for_each_function() {
    let text = summary(&[scenario(), Scenario { function: "json".to_owned(), ..scenario() }]);
    for cell in ["hello", "json", "cold boot", "4.0 ms", "3.5 ms, 3.0 MiB DRAM"] {
        assert!(text.contains(cell), "{cell} is missing: {text}");
    }
}
