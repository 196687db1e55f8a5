use std::collections::BTreeSet;

use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

use super::*;

proptest! {
    /// Compares with a set of single numbers.
    #[test]
    fn a_range_set_holds_what_was_inserted(
        ranges in proptest::collection::vec((0u64..60, 1u64..12), 0..20),
        asked in (0u64..60, 1u64..30),
    ) {
        let ranges: Vec<_> = ranges.into_iter().map(|(start, len)| start..start + len).collect();
        let model: BTreeSet<u64> = ranges.iter().cloned().flatten().collect();
        let set: RangeSet = ranges.into_iter().collect();

        let asked = asked.0..asked.0 + asked.1;
        let mut at = asked.start;
        for (part, held) in set.split(asked.clone()) {
            prop_assert_eq!(part.start, at, "the parts cover the range without gaps");
            prop_assert!(part.start < part.end);
            prop_assert!(part.clone().all(|n| model.contains(&n) == held));
            at = part.end;
        }
        prop_assert_eq!(at, asked.end);
        let runs = model.iter().filter(|&&n| n == 0 || !model.contains(&(n - 1))).count();
        prop_assert_eq!(set.len(), runs);
    }
}
