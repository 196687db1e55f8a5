use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::buffer::CHUNK;

/// Sends `bytes` over a flow, a window at a time, to a host that takes them at once.
fn send(windows: &mut Windows, flow: &mut usize, bytes: usize) {
    let mut left = bytes;
    while left > 0 {
        let taken = left.min(*flow);
        *flow = windows.grow(*flow, taken);
        *flow = windows.shrink(*flow, taken);
        left -= taken;
    }
}

#[test]
fn a_busy_flow_reaches_the_largest_window() {
    let mut windows = Windows::default();
    let mut flow = windows.open();
    assert_eq!(flow, FIRST);
    send(&mut windows, &mut flow, FIRST);
    assert_eq!(flow, 2 * FIRST);
    send(&mut windows, &mut flow, LARGEST);
    assert_eq!(flow, LARGEST);
}

/// Each flow has a window, and none grows beyond the memory for all.
#[test]
fn windows_share_the_memory_of_a_guest() {
    let mut windows = Windows::default();
    let flows: Vec<usize> = (0..5000).map(|_| windows.open()).collect();
    assert_eq!((flows[0], flows[4999]), (FIRST, CHUNK));
    assert!(windows.promised() <= TOTAL_LIMIT + 5000 * CHUNK);
    for _ in 0..2 {
        assert_eq!(windows.grow(FIRST, FIRST), FIRST);
    }
}

/// Those that come first leave the others as much as they keep.
#[test]
fn many_busy_flows_have_equal_windows() {
    let mut windows = Windows::default();
    let mut flows: Vec<usize> = (0..64).map(|_| windows.open()).collect();
    for _ in 0..4 {
        for flow in &mut flows {
            send(&mut windows, flow, 4 * LARGEST);
        }
    }
    let equal = TOTAL_LIMIT / 64;
    assert!(flows.iter().all(|flow| (equal / 2..=equal).contains(flow)), "{flows:?}");
}

/// Idle flows take nothing from those that are in use.
#[test]
fn an_idle_flow_leaves_its_memory() {
    let mut windows = Windows::default();
    let mut flows: Vec<usize> = (0..64).map(|_| windows.open()).collect();
    send(&mut windows, &mut flows[0], 4 * LARGEST);
    assert_eq!((flows[0], flows[1]), (LARGEST, FIRST));
}

proptest! {
    /// Whatever flows do, the bound holds, and no window shrinks by what its guest knows of.
    #[test]
    fn windows_are_bounded(steps in vec((0..3000_usize, 1..LARGEST, any::<bool>()), 1..3000)) {
        let mut windows = Windows::default();
        let mut flows = Vec::new();
        for (index, bytes, grows) in steps {
            if let Some(flow) = flows.get_mut(index) {
                let before = *flow;
                let bytes = bytes.min(before);
                if grows {
                    *flow = windows.grow(before, bytes);
                    prop_assert!((before..=before + bytes).contains(flow));
                } else {
                    *flow = windows.shrink(before, bytes);
                    prop_assert!((before - bytes..=before).contains(flow) && *flow >= CHUNK);
                }
            } else {
                flows.push(windows.open());
            }
            prop_assert_eq!(windows.promised(), flows.iter().sum::<usize>());
            prop_assert!(windows.promised() <= TOTAL_LIMIT + flows.len() * CHUNK);
        }
        flows.into_iter().for_each(|flow| windows.close(flow));
        prop_assert_eq!((windows.promised, windows.flows), (0, 0));
    }
}
