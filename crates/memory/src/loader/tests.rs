use std::io::Write;
use std::os::fd::AsRawFd;

use firn_snapshot::{MemoryLayout, PageSet};

use super::*;
use crate::HostFacts;
use crate::page_cache::{evict, residency};
use crate::plan::Step;
use crate::planners::{ImageFacts, PlanInput, parse};
use crate::testing::{file_on_a_medium, page_bytes};

const PAGE: u64 = 4096;

/// An image that is not in the page cache, and a plan that loads these ranges of it.
fn cold(pages: u64, ranges: &[(u64, u64)]) -> Option<(File, Plan)> {
    let mut image = file_on_a_medium()?;
    let bytes: Vec<u8> = (0..pages).flat_map(|page| page_bytes(page, 7)).collect();
    image.write_all(&bytes).unwrap();
    image.sync_all().unwrap();
    assert!(evict(&image).unwrap().is_cold());
    let layout = MemoryLayout::for_size(pages * PAGE).unwrap();
    let input = PlanInput {
        layout: &layout,
        image: ImageFacts::of(&image).unwrap(),
        zero_map: &PageSet::new(pages),
        profile: None,
        snapshot: None,
        copies: None,
        host: &HostFacts::read().unwrap(),
    };
    let mut plan = parse("firecracker:readahead=off").unwrap().plan(&input).unwrap();
    let step = |&(page, pages)| {
        let (offset, len) = (page * PAGE, pages * PAGE);
        Step { when: When::AtRequest, work: Work::Load { file: LoadFile::Image, offset, len } }
    };
    plan.schedule = ranges.iter().map(step).collect();
    plan.validate().unwrap();
    Some((image, plan))
}

fn run(plan: &Plan, image: &File) -> LoaderReport {
    Loader::start(plan, &Sources::image(image), now_ns()).unwrap().unwrap().finish().unwrap()
}

#[test]
fn only_the_ranges_of_the_plan_are_loaded() {
    let Some((image, plan)) = cold(2048, &[(1500, 3), (7, 1), (100, 700)]) else { return };
    let request = now_ns();
    let loader =
        Loader::start(&plan, &Sources::image(&image), request - 1_000_000).unwrap().unwrap();
    let start_ns = loader.begun().start_ns;
    assert!((1_000_000..=now_ns() - request + 1_000_000).contains(&start_ns), "{start_ns}");
    let begun = LoaderReport { start_ns, ranges: 3, bytes: 704 * PAGE, ..LoaderReport::default() };
    assert_eq!(loader.begun(), begun);
    while !loader.has_ended() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let report = loader.finish().unwrap();
    assert!(report.done && report.loaded && report.start_ns == start_ns);
    assert_eq!((report.ranges, report.bytes, report.read_bytes), (3, 704 * PAGE, 704 * PAGE));
    // The loader does not wait for storage.
    while residency(&image).unwrap().cached < 704 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(residency(&image).unwrap().cached, 704);
    // All ranges are cached now.
    let again = run(&plan, &image);
    assert_eq!((again.loaded, again.bytes, again.read_bytes), (true, 704 * PAGE, 0));
}

#[test]
fn a_loader_without_the_lock_loads_nothing() {
    let Some((image, plan)) = cold(64, &[(0, 64)]) else { return };
    let holder = File::open(format!("/proc/self/fd/{}", image.as_raw_fd())).unwrap();
    flock(&holder, FlockOperation::NonBlockingLockExclusive).unwrap();
    let report = run(&plan, &image);
    assert_eq!((report.loaded, report.bytes, report.read_bytes), (false, 64 * PAGE, 0));
    assert!(report.done);
    assert!(residency(&image).unwrap().is_cold());
    drop(holder);
    assert!(run(&plan, &image).loaded);
    // A finished loader has released the lock.
    assert!(run(&plan, &image).loaded);
}

#[test]
fn a_plan_without_loads_starts_no_loader() {
    let Some((image, plan)) = cold(64, &[]) else { return };
    assert!(Loader::start(&plan, &Sources::image(&image), now_ns()).unwrap().is_none());
}

#[test]
fn a_plan_that_loads_a_packed_file_needs_one() {
    let Some((image, mut plan)) = cold(64, &[]) else { return };
    let work = Work::Load { file: LoadFile::Packed, offset: 0, len: PAGE };
    plan.schedule = vec![Step { when: When::AtRequest, work }];
    let refused = Loader::start(&plan, &Sources::image(&image), now_ns()).unwrap_err();
    assert!(matches!(refused, LoadError::NoPackedFile));
}
