use std::os::unix::fs::FileExt;

use firn_memory::planners::{ImageFacts, PlanInput, parse};
use firn_memory::{HostFacts, Sources, execute};
use firn_snapshot::PageSet;

use super::*;

const MIB: u64 = 1 << 20;

/// Restored guest memory of 16 MiB, each page starting with its own number.
fn memory() -> GuestMemory {
    let image = tempfile::tempfile().unwrap();
    let layout = MemoryLayout::for_size(16 * MIB).unwrap();
    image.set_len(layout.total_bytes()).unwrap();
    for page in 0..layout.pages() {
        image.write_all_at(&page.to_le_bytes(), page * PAGE).unwrap();
    }
    let input = PlanInput {
        layout: &layout,
        image: ImageFacts::of(&image).unwrap(),
        zero_map: &PageSet::new(layout.pages()),
        profile: None,
        snapshot: None,
        copies: None,
        host: &HostFacts::read().unwrap(),
    };
    let plan = parse("firecracker").unwrap().plan(&input).unwrap();
    execute(&plan, &Sources::image(&image)).unwrap().memory
}

fn has_kvm() -> bool {
    firn_required::has("kvm", open_kvm(Path::new(KVM_DEVICE)).is_ok())
}

fn sum(pages: std::ops::Range<u64>) -> u64 {
    pages.sum()
}

#[test]
fn the_loop_touches_every_page_once() {
    if !has_kvm() {
        return;
    }
    let memory = memory();
    let range = GuestRange { start: 4 * MIB, len: 8 * MIB };
    for leaf in [Leaf::Size4K, Leaf::Size2M] {
        let (read, words) = run(&memory, range, FloorAccess::Read, leaf).unwrap();
        assert_eq!((read.pages, words), (2048, sum(1024..3072)));
        assert!(read.kvm.page_faults > 0 && read.kvm.mapped_pages() >= 2048);
    }
    // Every word is one more now, and no other page was written.
    let (write, words) = run(&memory, range, FloorAccess::Write, Leaf::Size4K).unwrap();
    assert_eq!((write.pages, words), (2048, 0));
    let all = GuestRange { start: 0, len: 16 * MIB };
    let (_, words) = run(&memory, all, FloorAccess::Read, Leaf::Size4K).unwrap();
    assert_eq!(words, sum(0..4096) + 2048);
}

#[test]
fn ranges_that_do_not_fit_are_rejected() {
    let memory = memory();
    for (start, len, leaf) in [
        (0, 0, Leaf::Size4K),
        (0, PAGE + 1, Leaf::Size4K),
        (PAGE, 2 * MIB, Leaf::Size2M),
        (0, 17 * MIB, Leaf::Size4K),
        (u64::MAX - PAGE + 1, PAGE, Leaf::Size4K),
        (0, 16 * MIB, Leaf::Size1G),
    ] {
        let result = run(&memory, GuestRange { start, len }, FloorAccess::Read, leaf);
        assert!(matches!(result, Err(FloorError::Range { .. })), "{start:#x} {len:#x}");
    }
}
