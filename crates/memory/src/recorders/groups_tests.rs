use std::env;
use std::ops::Range;
use std::process::Command;

use firn_base::PAGE_SIZE;
use firn_snapshot::{ImageKind, MemoryLayout, PageSet};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::executor::{Sources, execute};
use crate::page_cache::evict;
use crate::planners::{parse, plan};
use crate::testing::write_snapshot;

const NAME: &str = "recorders::groups::tests::a_group_ends_as_resident_memory_grows_by_1024_pages";
const ALONE: &str = "FIRN_TEST_ALONE";
const PAGES: u64 = 32768;
/// The touched places, from last to first, so that the order of addresses differs from the order of
/// access. The kernel, which reads up to 2048 pages ahead on some disks, does not reach from one
/// place to the next.
const PLACES: [u64; 4] = [26_112, 16_384, 8192, 0];
/// The tolerance of a group's size in pages: the kernel counts some pages late, and maps some
/// adjacent pages.
const MARGIN: u64 = 256;

/// Runs in a separate process, because other tests change the resident memory.
#[test]
fn a_group_ends_as_resident_memory_grows_by_1024_pages() {
    if env::var_os(ALONE).is_some() {
        return groups_of_touches();
    }
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture", "--test-threads=1"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let (stdout, error) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{error}");
    assert!(String::from_utf8_lossy(stdout).contains("1 passed"), "{error}");
}

fn groups_of_touches() {
    let dir = tempfile::tempdir().unwrap();
    let layout = MemoryLayout::for_size(PAGES * PAGE_SIZE).unwrap();
    let path = dir.path().join("s");
    let snapshot = write_snapshot(&path, &layout, &PageSet::new(PAGES), ImageKind::Dense, 5);
    if !firn_required::has("disk", evict(snapshot.image_file().unwrap()).unwrap().is_cold()) {
        return;
    }
    let mut groups = Groups::default();
    groups.prepare(&snapshot).unwrap();
    let plan = plan(&snapshot, None, &*parse(groups.planner()).unwrap()).unwrap();
    let sources = Sources::of(&snapshot, None).unwrap();
    let memory = execute(&plan, &sources).unwrap().memory.vm_memory();
    let mut sampler = Sampler::new(&snapshot, std::process::id()).unwrap();
    let touch = |pages: Range<u64>| {
        for page in pages {
            memory.read_obj::<u8>(GuestAddress(page * PAGE_SIZE)).unwrap();
        }
    };
    let mut ended = |pages: Range<u64>| {
        touch(pages);
        sampler.poll().unwrap();
        sampler.groups.len()
    };
    let [first, alone, second, last] = PLACES;
    assert_eq!(ended(first..first + GROWTH / 2), 0);
    assert_eq!(ended(first + GROWTH / 2..first + GROWTH + MARGIN), 1);
    assert_eq!(ended(alone..alone + 1), 1);
    assert_eq!(ended(second..second + GROWTH + MARGIN), 2);
    assert_eq!(ended(last..last + 8), 2);
    let (alive, ended) = channel();
    drop(alive);
    let groups = sampler.run(&ended).unwrap();
    let groups: Vec<PageSet> = groups.iter().map(|runs| PageSet::of(runs, PAGES)).collect();

    assert_eq!(groups.len(), 3);
    for (group, touched) in [
        (0, first..first + GROWTH + MARGIN),
        (1, alone..alone + 1),
        (1, second..second + GROWTH + MARGIN),
        (2, last..last + 8),
    ] {
        for page in touched {
            let found: Vec<usize> = (0..3).filter(|group| groups[*group].get(page)).collect();
            assert_eq!(found, [group], "page {page}");
        }
    }
    // One page was touched, and the kernel read others with it, but not up to the next place.
    let about = |pages: Range<u64>| pages.filter(|page| groups[1].get(*page)).count();
    assert!(about(alone - GROWTH..alone + GROWTH) > 1);
    let untouched = first - GROWTH - 2000..first - GROWTH;
    assert!(groups.iter().all(|group| untouched.clone().all(|page| !group.get(page))));
}
