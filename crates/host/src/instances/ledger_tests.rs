use proptest::prelude::{any, prop, proptest};

use super::*;

fn cost(revision: u128, private: u64, shared: u64) -> Cost {
    Cost { revision: Uuid::from_u128(revision), private, shared }
}

#[test]
fn an_image_is_counted_once_for_all_who_share_it() {
    let mut ledger = Ledger::new(Budget { memory: 100, monitors: 9 });
    assert!(ledger.book(&cost(1, 20, 40)));
    assert!(ledger.book(&cost(1, 20, 40)));
    assert_eq!((ledger.private_bytes(), ledger.shared_bytes()), (40, 40));
    assert!(!ledger.book(&cost(2, 10, 20)), "another image has no room");
    assert!(ledger.book(&cost(1, 20, 40)));
    for _ in 0..3 {
        ledger.cancel(&cost(1, 20, 40));
    }
    assert_eq!((ledger.private_bytes(), ledger.shared_bytes(), ledger.monitors()), (0, 0, 0));
    assert!(ledger.book(&cost(2, 60, 40)));
}

#[test]
fn what_could_never_fit_is_told_from_what_has_to_wait() {
    let mut ledger = Ledger::new(Budget { memory: 100, monitors: 1 });
    assert!(ledger.book(&cost(1, 50, 0)));
    assert!(!ledger.book(&cost(2, 10, 0)), "one microVM at a time");
    assert!(ledger.could_fit(&cost(2, 60, 40)));
    assert!(!ledger.could_fit(&cost(2, 60, 41)));
    assert!(!ledger.could_fit(&cost(2, u64::MAX, 1)));
}

#[test]
fn requests_in_flight_are_limited_by_function() {
    let mut ledger = Ledger::new(Budget { memory: 1, monitors: 1 });
    assert!(ledger.enter("f", Some(1)));
    assert!(!ledger.enter("f", Some(1)));
    assert!(ledger.enter("g", Some(1)) && ledger.enter("f", None));
    ledger.leave("f");
    assert!(!ledger.may_enter("f", Some(1)));
    ledger.leave("f");
    assert!(ledger.may_enter("f", Some(1)));
    assert!(!ledger.may_enter("f", Some(0)));
}

proptest! {
    #[test]
    fn never_over_the_budget_and_nothing_left_in_the_end(
        steps in prop::collection::vec((any::<bool>(), 0..4_u128, 0..60_u64), 0..100),
    ) {
        let budget = Budget { memory: 200, monitors: 5 };
        let mut ledger = Ledger::new(budget);
        let mut booked = Vec::new();
        for (start, revision, private) in steps {
            let cost = cost(revision, private, u64::try_from(revision).unwrap() * 10);
            if start && ledger.book(&cost) {
                booked.push(cost);
            } else if let Some(cost) = booked.pop() {
                ledger.cancel(&cost);
            }
            assert!(ledger.private_bytes() + ledger.shared_bytes() <= budget.memory);
            assert_eq!(ledger.monitors(), booked.len());
        }
        booked.iter().for_each(|cost| ledger.cancel(cost));
        assert_eq!((ledger.private_bytes(), ledger.shared_bytes()), (0, 0));
    }
}
