use std::collections::BTreeSet;

use super::{Fault, Medium, Search, SimulatedMedium};

const SEARCH: Search = Search { states: 1 << 10, lines: 8, samples: 50, seed: 7 };

/// The values of two words after a loss of power at any recorded moment.
fn outcomes(medium: &SimulatedMedium) -> BTreeSet<(u64, u64)> {
    let mut found = BTreeSet::new();
    for epoch in medium.epochs() {
        epoch.try_states(&SEARCH, &mut |state| {
            found.insert((state.load_word(0), state.load_word(64)));
        });
    }
    found
}

#[test]
fn unfenced_words_may_be_lost_in_any_order() {
    let medium = SimulatedMedium::new(2 << 20);
    medium.record();
    medium.store_word(0, 1);
    medium.store_word(64, 2);
    assert_eq!(outcomes(&medium), [(0, 0), (0, 2), (1, 0), (1, 2)].into());
}

#[test]
fn fenced_words_are_durable() {
    let medium = SimulatedMedium::new(2 << 20);
    medium.record();
    medium.store_word(0, 1);
    medium.flush(0, 8);
    medium.fence().unwrap();
    medium.store_word(64, 2);
    assert_eq!(outcomes(&medium), [(0, 0), (1, 0), (1, 2)].into());
}

#[test]
fn unflushed_stores_are_not_durable_after_a_fence() {
    let medium = SimulatedMedium::new(2 << 20);
    medium.record();
    medium.store_word(0, 1);
    medium.fence().unwrap();
    medium.store_word(64, 2);
    medium.flush(64, 8);
    medium.store_word(64, 3);
    medium.fence().unwrap();
    let last = *outcomes(&medium).last().unwrap();
    assert_eq!(last, (1, 3));
    let medium = SimulatedMedium::new(2 << 20);
    medium.store_word(64, 2);
    medium.flush(64, 8);
    medium.store_word(64, 3);
    medium.fence().unwrap();
    medium.record();
    assert_eq!(outcomes(&medium), [(0, 2), (0, 3)].into());
}

#[test]
fn injected_faults_lose_fenced_words() {
    for fault in [Fault::NoFlush, Fault::NoFence] {
        let medium = SimulatedMedium::faulty(2 << 20, fault);
        medium.store_word(0, 1);
        medium.flush(0, 8);
        medium.fence().unwrap();
        medium.record();
        assert_eq!(outcomes(&medium), [(0, 0), (1, 0)].into(), "{fault:?}");
    }
}

#[test]
fn bytes_are_stored_at_any_alignment() {
    let medium = SimulatedMedium::new(2 << 20);
    medium.store(5, b"hello, lines and words");
    let mut bytes = [0; 24];
    medium.load(4, &mut bytes);
    assert_eq!(&bytes, b"\0hello, lines and words\0");
    assert_eq!(medium.clone_now().load_word(8), u64::from_le_bytes(*b"lo, line"));
}

#[test]
fn large_epochs_are_sampled_and_counted() {
    let medium = SimulatedMedium::new(2 << 20);
    medium.record();
    medium.store(0, &[1; 3 * 64]);
    let epochs = medium.epochs();
    let mut torn = 0;
    let tried = epochs[0].try_states(&SEARCH, &mut |state| {
        let mut line = [0; 64];
        state.load(0, &mut line);
        torn += u32::from(line.contains(&0) && line.contains(&1));
    });
    assert_eq!((tried.epochs, tried.exhausted, tried.most_lines), (1, 0, 3));
    assert_eq!(tried.states, 8 + 50);
    assert!(torn > 40, "{torn}");
}
