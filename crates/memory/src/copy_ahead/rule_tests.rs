use firn_base::PageRange;

use super::*;

#[test]
fn a_chunk_is_selected_by_the_number_of_its_written_pages() {
    let runs = [(10, 1), (510, 4), (1030, 2), (1100, 2), (2048, 1024)];
    let written = runs.map(|(first, pages)| PageRange { first, pages }).to_vec();
    let profile = Profile { written: Some(written), ..Profile::default() };
    let chunks = |from| {
        Rule { written: from, read: 0 }
            .written_chunks(&profile)
            .iter()
            .map(|r| r.first / 512)
            .collect::<Vec<_>>()
    };
    assert_eq!(chunks(1), [0, 1, 2, 4, 5]);
    assert_eq!(chunks(3), [0, 2, 4, 5]);
    assert_eq!(chunks(4), [2, 4, 5]);
    assert_eq!(chunks(512), [4, 5]);
    assert!(Rule::DEFAULT.written_chunks(&Profile::default()).is_empty());
}

#[test]
fn a_chunk_that_is_only_read_is_selected_by_its_pages_in_small_leaves() {
    let runs = |runs: &[(u64, u64)]| {
        Some(runs.iter().map(|(first, pages)| PageRange { first: *first, pages: *pages }).collect())
    };
    let profile = Profile {
        faults: runs(&[(10, 20), (100, 12), (512, 31), (1024, 512), (1540, 1), (2048, 1024)]),
        small_leaves: runs(&[(10, 20), (100, 12), (512, 31), (1024, 512), (1540, 1), (2560, 512)]),
        written: runs(&[(1100, 1)]),
        ..Profile::default()
    };
    let chunks = |from| {
        Rule { written: 1, read: from }
            .read_chunks(&profile)
            .iter()
            .map(|r| r.first / 512)
            .collect::<Vec<_>>()
    };
    assert_eq!(chunks(1), [0, 1, 3, 5]);
    assert_eq!(chunks(32), [0, 5], "chunk 2 is written, and chunk 4 is in a large leaf");
    assert_eq!(chunks(33), [5]);
    assert!(chunks(0).is_empty());
    let unknown = Profile { small_leaves: None, ..profile };
    assert!(Rule { written: 1, read: 1 }.read_chunks(&unknown).is_empty());
}

#[test]
fn chunks_are_ascending_and_only_software_page_tables_need_copies_of_read_ones() {
    let runs = |first| Some(vec![PageRange { first, pages: 600 }]);
    let profile = Profile { written: runs(2048), small_leaves: runs(512), ..Profile::default() };
    let chunks = |nested| {
        let chunks = Rule::DEFAULT.for_paging(nested).chunks(&profile);
        chunks.iter().map(|run| run.first / CHUNK_PAGES).collect::<Vec<_>>()
    };
    assert_eq!(chunks(false), [1, 2, 4, 5]);
    assert_eq!(chunks(true), [4, 5]);
}

#[test]
fn every_run_uses_the_read_chunks_of_the_profile() {
    let small_leaves = Some(vec![PageRange { first: 512, pages: 512 }]);
    let profile = Profile { small_leaves, ..Profile::default() };
    let written = [PageRange { first: 0, pages: 512 }, PageRange { first: 1536, pages: 512 }];
    let used = Rule::DEFAULT.with_read_chunks(&written, &profile, 1600);
    assert_eq!(used, [PageRange { first: 0, pages: 1024 }, PageRange { first: 1536, pages: 64 }]);
}

#[test]
fn a_rule_is_found_again_by_its_key() {
    let rule = Rule { written: 4, read: 0 };
    assert_eq!(Rule::of_key(&rule.key()), Some(rule));
    for other in ["", "written=4", "written=x,read=0", "read=0,written=4"] {
        assert_eq!(Rule::of_key(other), None, "{other}");
    }
}
