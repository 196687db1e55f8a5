//! Guest memory after a run, compared with the image (`firn thaw --compare`).

use std::collections::BTreeSet;

use firn_base::PageRange;
use serde_json::Value;

/// Checks that every page that the run did not write equals the image. Pages in `zeros` may be zero
/// instead.
#[track_caller]
pub fn check_memory(report: &Value, zeros: &BTreeSet<u64>) {
    let compared = &report["compared"];
    let count = |what: &str| compared[what].as_u64().unwrap_or_else(|| panic!("{what}: {report}"));
    let runs: Vec<PageRange> = serde_json::from_value(compared["zeros"].clone()).unwrap();
    let found: BTreeSet<u64> = runs.iter().flat_map(PageRange::range).collect();
    assert_eq!(count("differing"), found.len() as u64, "{report}");
    assert!(found.is_subset(zeros), "in use, and zero: {:?}", found.difference(zeros).next());
    // Most of guest memory was compared, and the guest wrote pages. In a run that takes long it has
    // also reported its free pages, half of all and more.
    let written = count("written") - count("reported");
    assert!((100..count("pages") / 2).contains(&written), "{report}");
}
