use proptest::prelude::{any, prop, proptest};

use super::*;

fn cost(revision: u128, private: u64, shared: u64) -> Cost {
    Cost { revision: Uuid::from_u128(revision), private, shared }
}

fn ledger(memory: u64, monitors: usize) -> Ledger {
    Ledger::new(Budget { memory, monitors, measured: true })
}

#[test]
fn an_image_is_counted_once_for_all_who_share_it() {
    let mut ledger = ledger(100, 9);
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
    let mut ledger = ledger(100, 1);
    assert!(ledger.book(&cost(1, 50, 0)));
    assert!(!ledger.book(&cost(2, 10, 0)), "one microVM at a time");
    assert!(ledger.could_fit(&cost(2, 60, 40)));
    assert!(!ledger.could_fit(&cost(2, 60, 41)));
    assert!(!ledger.could_fit(&cost(2, u64::MAX, 1)));
}

#[test]
fn a_revision_is_booked_by_what_was_measured_of_it() {
    const MIB: u64 = 1 << 20;
    let mut account = ledger(500 * MIB, 99);
    let worst = cost(1, 192 * MIB, 100 * MIB);
    assert!(account.book(&worst) && account.book(&worst) && !account.book(&worst));
    account.learn(worst.revision, Usage { private: 14 * MIB, shared: 50 * MIB });
    account.learn(worst.revision, Usage { private: 4 * MIB, shared: 60 * MIB });
    assert_eq!((account.private_bytes(), account.shared_bytes()), (60 * MIB, 60 * MIB));
    let more = (0..).take_while(|_| account.book(&worst)).count();
    assert_eq!(more, 12, "(500 - 60) / 30 in all");
    // One that grew beyond what was expected makes all of them dearer, at most to the worst.
    account.learn(worst.revision, Usage { private: 400 * MIB, shared: 0 });
    assert!(account.is_over());
    assert_eq!(account.expected(&worst).private, worst.private);
    account.forget(worst.revision);
    assert_eq!(account.expected(&worst), Usage { private: worst.private, shared: worst.shared });

    let mut strict = Ledger::new(Budget { memory: 500 * MIB, monitors: 9, measured: false });
    strict.learn(worst.revision, Usage { private: 1, shared: 1 });
    assert!(strict.book(&worst) && strict.book(&worst) && !strict.book(&worst));
}

#[test]
fn requests_in_flight_are_limited_by_function() {
    let mut ledger = ledger(1, 1);
    assert!(ledger.enter("f", Some(1)));
    assert!(!ledger.enter("f", Some(1)));
    assert!(ledger.enter("g", Some(1)) && ledger.enter("f", None));
    ledger.leave("f");
    assert!(!ledger.enter("f", Some(1)));
    ledger.leave("f");
    assert!(!ledger.enter("f", Some(0)));
    assert!(ledger.enter("f", Some(1)));
}

proptest! {
    #[test]
    fn never_over_the_budget_and_nothing_left_in_the_end(
        steps in prop::collection::vec((any::<bool>(), 0..4_u128, 0..60_u64), 0..100),
    ) {
        let budget = Budget { memory: 200, monitors: 5, measured: true };
        let mut ledger = Ledger::new(budget);
        let mut booked = Vec::new();
        for (start, revision, usage) in steps {
            let cost = cost(revision, 50, u64::try_from(revision).unwrap() * 10);
            if start {
                let before = ledger.is_over();
                if ledger.book(&cost) {
                    assert!(!before && !ledger.is_over());
                    booked.push(cost);
                }
            } else if usage < 30 {
                ledger.learn(cost.revision, Usage { private: usage, shared: usage });
            } else if let Some(cost) = booked.pop() {
                ledger.cancel(&cost);
            }
            assert_eq!(ledger.monitors(), booked.len());
        }
        booked.iter().for_each(|cost| ledger.cancel(cost));
        assert_eq!((ledger.private_bytes(), ledger.shared_bytes()), (0, 0));
    }
}
