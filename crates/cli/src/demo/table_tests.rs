use super::of;
use crate::demo::story::{Start, Story};

fn start(name: &str, parts: &[(&str, u64)], pages: Option<u64>) -> Start {
    Start {
        name: name.to_owned(),
        parts: parts.iter().map(|(name, ns)| ((*name).to_owned(), *ns)).collect(),
        total_ns: parts.iter().map(|(_, ns)| ns).sum(),
        guest_pages: pages,
        kvm_faults: None,
        read_bytes: None,
        private_bytes: None,
        shared_bytes: None,
    }
}

#[test]
fn every_part_is_a_row_and_the_response_comes_after_all_other_parts() {
    let story = Story {
        function: "hello".to_owned(),
        freeze: vec![("total".to_owned(), 2_000_000)],
        snapshot_bytes: 1 << 20,
        thaws: 3,
        starts: vec![
            start("cold boot", &[("boot Linux", 3_000_000), ("first response", 1_000_000)], None),
            start("thaw", &[("load", 2_000_000), ("first response", 1_500_000)], Some(77)),
        ],
    };
    let text = of(&story);
    let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what} is missing: {text}"));
    assert!(at("boot Linux") < at("first response"));
    assert!(at("load") < at("first response"));
    assert!(at("first response") < at("total"));
    for cell in ["3.0 ms", "3.5 ms", "77", "freeze: total 2.0 ms", "1.0 MiB"] {
        at(cell);
    }
}
