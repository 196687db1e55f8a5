use vm_memory::{Bytes, GuestAddress};

use super::*;

#[test]
fn counters_of_this_process_grow() {
    let before = ProcessCounters::read().unwrap();
    let layout = firn_snapshot::MemoryLayout::for_size(1 << 20).unwrap();
    let memory = crate::GuestMemory::anonymous(layout).unwrap();
    memory.vm_memory().write_slice(&[1; 1 << 20], GuestAddress(0)).unwrap();
    let after = ProcessCounters::read().unwrap();
    assert!(after.minor_faults >= before.minor_faults + 256, "{before:?} {after:?}");
    assert!(after.major_faults >= before.major_faults);
    assert!(after.read_bytes >= before.read_bytes);
}

#[test]
fn counters_of_another_process_differ_from_this_process() {
    let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let counters = ProcessCounters::of(other.id()).unwrap();
    assert!(counters.minor_faults > 0, "{counters:?}");
    other.kill().unwrap();
    other.wait().unwrap();
    let gone = ProcessCounters::of(other.id()).unwrap_err();
    assert!(gone.to_string().contains(&other.id().to_string()), "{gone}");
}

#[test]
fn counters_of_a_thread_exclude_other_threads() {
    let other = std::thread::spawn(|| {
        let before = ProcessCounters::of_this_thread().unwrap();
        let layout = firn_snapshot::MemoryLayout::for_size(1 << 20).unwrap();
        let memory = crate::GuestMemory::anonymous(layout).unwrap();
        memory.vm_memory().write_slice(&[1; 1 << 20], GuestAddress(0)).unwrap();
        (before, ProcessCounters::of_this_thread().unwrap())
    });
    let (before, after) = other.join().unwrap();
    assert!(after.minor_faults >= before.minor_faults + 256, "{before:?} {after:?}");
    assert!(after.minor_faults <= ProcessCounters::read().unwrap().minor_faults);
}
