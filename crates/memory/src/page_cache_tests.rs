use std::io::Write;

use super::*;
use crate::testing::file_on_a_medium;

#[test]
fn a_file_is_evicted_and_preloaded() {
    let Some(mut file) = file_on_a_medium() else { return };
    file.write_all(&vec![1; 3 << 20]).unwrap();
    let all = Residency { pages: 768, cached: 768 };
    assert_eq!(residency(&file).unwrap(), all, "written pages are cached");
    assert!(evict(&file).unwrap().is_cold());
    assert_eq!(preload(&file, 1 << 20..2 << 20).unwrap(), 1 << 20);
    let part = residency(&file).unwrap();
    assert!(part.cached >= 256 && !part.is_cold());
    assert_eq!(preload(&file, 0..3 << 20).unwrap(), 3 << 20);
    assert!(residency(&file).unwrap().is_cached());
}

#[test]
fn holes_are_counted_and_not_preloaded() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    assert_eq!(preload(&file, 0..1 << 20).unwrap(), 0);
    assert_eq!(stored_residency(&file).unwrap(), Residency::default());
    file.write_all_at(&[1; 5000], 64 << 10).unwrap();
    assert_eq!(preload(&file, 0..1 << 20).unwrap(), 8192, "whole pages");
    assert_eq!(preload(&file, 0..64 << 10).unwrap(), 0);
    assert_eq!(stored_residency(&file).unwrap(), Residency { pages: 2, cached: 2 });
    assert_eq!(residency(&file).unwrap().pages, 256);
}

#[test]
fn pages_are_read_one_by_one() {
    let Some(mut file) = file_on_a_medium() else { return };
    file.write_all(&vec![1; (1 << 20) + 100]).unwrap();
    evict(&file).unwrap();
    assert_eq!(preload_small(&file).unwrap(), (1 << 20) + 100);
    assert_eq!(touch(&file).unwrap(), (1 << 20) + 100);
    assert!(stored_residency(&file).unwrap().is_cached());
}

#[test]
fn a_mapped_page_is_not_evicted() {
    let Some(mut file) = file_on_a_medium() else { return };
    file.write_all(&vec![1; 1 << 20]).unwrap();
    let layout = firn_snapshot::MemoryLayout::for_size(1 << 20).unwrap();
    let host = crate::HostFacts::read().unwrap();
    let zero_map = PageSet::new(layout.pages());
    let image = crate::planners::ImageFacts::of(&file).unwrap();
    let input = crate::planners::PlanInput {
        layout: &layout,
        image,
        zero_map: &zero_map,
        profile: None,
        snapshot: None,
        copies: None,
        host: &host,
    };
    let plan = crate::planners::parse("firecracker").unwrap().plan(&input).unwrap();
    let executed = crate::execute(&plan, &crate::Sources::image(&file)).unwrap();
    assert!(crate::compare::compare(&executed.memory, &file, &zero_map).unwrap().is_equal());
    assert!(evict(&file).unwrap().is_cached(), "every page is mapped");
    drop(executed);
    assert!(evict(&file).unwrap().is_cold());
}

#[test]
fn an_empty_file_is_cold_and_cached() {
    let file = tempfile::tempfile().unwrap();
    assert_eq!(residency(&file).unwrap(), Residency::default());
    assert_eq!(stored_residency(&file).unwrap(), Residency::default());
}
