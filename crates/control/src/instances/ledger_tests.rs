use proptest::prelude::{any, prop, proptest};

use super::*;
use crate::instances::AcquireError;

fn cost(revision: u128, private: u64, shared: u64) -> Cost {
    Cost { revision: Uuid::from_u128(revision), private, shared, disk: 0, disk_in_memory: false }
}

fn ledger(memory: u64, monitors: usize) -> Ledger {
    Ledger::new(Budget { memory, monitors, scratch: u64::MAX, measured: true })
}

#[test]
fn a_shared_image_is_counted_once() {
    let mut ledger = ledger(100, 9);
    assert!(ledger.reserve(&cost(1, 20, 40)));
    assert!(ledger.reserve(&cost(1, 20, 40)));
    assert_eq!((ledger.private_bytes(), ledger.shared_bytes()), (40, 40));
    assert!(!ledger.reserve(&cost(2, 10, 20)), "the memory does not suffice for another image");
    assert!(ledger.reserve(&cost(1, 20, 40)));
    for _ in 0..3 {
        ledger.release(&cost(1, 20, 40));
    }
    assert_eq!((ledger.private_bytes(), ledger.shared_bytes(), ledger.monitors()), (0, 0, 0));
    assert!(ledger.reserve(&cost(2, 60, 40)));
}

#[test]
fn a_microvm_that_can_never_fit_differs_from_one_that_waits() {
    let mut ledger = ledger(100, 1);
    assert!(ledger.reserve(&cost(1, 50, 0)));
    assert!(!ledger.reserve(&cost(2, 10, 0)), "one microVM at a time");
    assert_eq!(ledger.shortage(&cost(2, 10, 0)), Some(Shortage::Monitors(1)));
    let error = AcquireError::TimedOut(ledger.shortage(&cost(2, 10, 0))).to_string();
    assert!(error.contains("in time (--queue-wait): ") && error.contains("--monitors"), "{error}");
    assert_eq!(ledger.never_fits(&cost(2, 60, 40)), None);
    let needed = Shortage::Memory { needed: 101, disk: 0, free: 100, limit: 100 };
    assert_eq!(ledger.never_fits(&cost(2, 60, 41)), Some(needed));
    assert!(ledger.never_fits(&cost(2, u64::MAX, 1)).is_some());
}

#[test]
fn reservations_follow_the_measured_memory_use() {
    const MIB: u64 = 1 << 20;
    let mut account = ledger(500 * MIB, 99);
    let worst = cost(1, 192 * MIB, 100 * MIB);
    assert!(account.reserve(&worst) && account.reserve(&worst) && !account.reserve(&worst));
    account.record_usage(worst.revision, Usage { private: 14 * MIB, shared: 50 * MIB });
    account.record_usage(worst.revision, Usage { private: 4 * MIB, shared: 60 * MIB });
    assert_eq!((account.private_bytes(), account.shared_bytes()), (60 * MIB, 60 * MIB));
    let more = (0..).take_while(|_| account.reserve(&worst)).count();
    assert_eq!(more, 12, "(500 - 60) / 30 in all");
    // A larger measurement raises the reservation of every microVM of the revision, at most to the
    // worst case.
    account.record_usage(worst.revision, Usage { private: 400 * MIB, shared: 0 });
    assert!(account.is_over());
    assert_eq!(account.expected(&worst).private, worst.private);
    account.forget(worst.revision);
    assert_eq!(account.expected(&worst), Usage { private: worst.private, shared: worst.shared });

    let mut strict =
        Ledger::new(Budget { memory: 500 * MIB, monitors: 9, scratch: 9, measured: false });
    strict.record_usage(worst.revision, Usage { private: 1, shared: 1 });
    assert!(strict.reserve(&worst) && strict.reserve(&worst) && !strict.reserve(&worst));
}

#[test]
fn a_disk_in_memory_is_reserved_whatever_was_measured() {
    const MIB: u64 = 1 << 20;
    let mut account = ledger(900 * MIB, 99);
    let worst = Cost { disk: 200 * MIB, disk_in_memory: true, ..cost(1, 192 * MIB, 0) };
    assert!(account.reserve(&worst));
    // A guest that has answered and has not written to its disk yet can still fill it.
    account.record_usage(worst.revision, Usage { private: 34 * MIB, shared: 0 });
    assert_eq!(account.private_bytes(), 250 * MIB);
    assert!(account.reserve(&worst) && account.reserve(&worst));
    let shortage = account.shortage(&worst).unwrap();
    assert_eq!(
        shortage.to_string(),
        "it needs 250.0 MiB of memory (200.0 MiB for its disk, --disk), and 150.0 MiB of 900.0 MiB are free (--memory)"
    );
    assert!(!account.reserve(&worst));
}

#[test]
fn disks_are_limited_by_the_space_for_them() {
    let budget = Budget { memory: 100, monitors: 9, scratch: 300, measured: true };
    let mut ledger = Ledger::new(budget);
    let of = |revision, disk| Cost { disk, ..cost(revision, 1, 0) };
    assert!(ledger.reserve(&of(1, 100)) && ledger.reserve(&of(1, 100)));
    let lacks = |needed, free| Some(Shortage::Disk { needed, free, limit: 300 });
    assert_eq!(ledger.shortage(&of(2, 101)), lacks(101, 100));
    assert!(!ledger.reserve(&of(2, 101)) && ledger.reserve(&of(2, 100)));
    assert_eq!(ledger.shortage(&of(3, 1)), lacks(1, 0));
    // One that waits differs from one that never fits.
    assert_eq!(ledger.never_fits(&of(3, 300)), None);
    assert_eq!(ledger.never_fits(&of(3, 301)), lacks(301, 300));
    ledger.release(&of(1, 100));
    assert!(ledger.reserve(&of(3, 100)));
}

#[test]
fn requests_in_flight_are_limited_per_function() {
    let mut ledger = ledger(1, 1);
    assert!(ledger.begin_request("f", Some(1)));
    assert!(!ledger.begin_request("f", Some(1)));
    assert!(ledger.begin_request("g", Some(1)) && ledger.begin_request("f", None));
    ledger.end_request("f");
    assert!(!ledger.begin_request("f", Some(1)));
    ledger.end_request("f");
    assert!(!ledger.begin_request("f", Some(0)));
    assert!(ledger.begin_request("f", Some(1)));
}

proptest! {
    #[test]
    fn reservations_stay_within_the_budget_and_are_all_released(
        steps in prop::collection::vec((any::<bool>(), 0..4_u128, 0..60_u64), 0..100),
    ) {
        let budget = Budget { memory: 200, monitors: 5, scratch: 150, measured: true };
        let mut ledger = Ledger::new(budget);
        let mut reserved = Vec::new();
        for (start, revision, usage) in steps {
            let cost = cost(revision, 50, u64::try_from(revision).unwrap() * 10);
            let cost = Cost { disk: 30, ..cost };
            if start {
                let before = ledger.is_over();
                if ledger.reserve(&cost) {
                    assert!(!before && !ledger.is_over());
                    reserved.push(cost);
                }
            } else if usage < 30 {
                ledger.record_usage(cost.revision, Usage { private: usage, shared: usage });
            } else if let Some(cost) = reserved.pop() {
                ledger.release(&cost);
            }
            assert_eq!(ledger.monitors(), reserved.len());
        }
        reserved.iter().for_each(|cost| ledger.release(cost));
        assert_eq!((ledger.private_bytes(), ledger.shared_bytes()), (0, 0));
    }
}
