use firn_base::PageRange;

use super::*;

fn runs(runs: &[(u64, u64)]) -> Option<Vec<PageRange>> {
    Some(runs.iter().map(|(first, pages)| PageRange { first: *first, pages: *pages }).collect())
}

fn rule(written: u64, read: u64, granule: Granule) -> Rule {
    Rule { written, read, granule, learn: true }
}

#[test]
fn a_granule_is_selected_by_the_number_of_its_written_pages() {
    let written = runs(&[(10, 1), (510, 4), (1030, 2), (1100, 2), (2048, 1024)]);
    let profile = Profile { written, ..Profile::default() };
    let chunks = |from| rule(from, 0, Granule::Size2M).granules(&profile);
    assert_eq!(chunks(1), [0, 1, 2, 4, 5]);
    assert_eq!(chunks(3), [0, 2, 4, 5]);
    assert_eq!(chunks(4), [2, 4, 5]);
    assert_eq!(chunks(512), [4, 5]);
    let fine = |from| {
        let mut granules = rule(from, 0, Granule::Size16K).granules(&profile);
        granules.retain(|granule| *granule < 512);
        granules
    };
    assert_eq!(fine(1), [2, 127, 128, 257, 275]);
    assert_eq!(fine(2), [127, 128, 257, 275]);
    assert!(fine(4).is_empty() && fine(512).is_empty(), "a granule has four pages");
    assert_eq!(rule(512, 0, Granule::Size16K).granules(&profile).len(), 256);
    let pages = rule(512, 0, Granule::Size4K).granules(&profile);
    assert_eq!(pages[..9], [10, 510, 511, 512, 513, 1030, 1031, 1100, 1101]);
    assert!(Rule::DEFAULT.granules(&Profile::default()).is_empty());
}

#[test]
fn a_chunk_that_is_only_read_is_selected_by_its_pages_in_small_leaves() {
    let small = [(10, 20), (100, 12), (512, 31), (1024, 512), (1540, 1), (2560, 512)];
    let profile = Profile {
        faults: runs(&[(10, 20), (100, 12), (512, 31), (1024, 512), (1540, 1), (2048, 1024)]),
        small_leaves: runs(&small),
        written: runs(&[(1100, 1)]),
        ..Profile::default()
    };
    let chunks = |read| {
        let granules = rule(1, read, Granule::Size2M).granules(&profile);
        granules.into_iter().filter(|chunk| *chunk != 2).collect::<Vec<_>>()
    };
    assert_eq!(chunks(1), [0, 1, 3, 5]);
    assert_eq!(chunks(32), [0, 5], "chunk 2 is written, and chunk 4 is in a large leaf");
    assert_eq!(chunks(33), [5]);
    assert!(chunks(0).is_empty());
    let unknown = Profile { small_leaves: None, ..profile };
    assert_eq!(rule(1, 1, Granule::Size2M).granules(&unknown), [2]);
}

#[test]
fn of_a_written_chunk_all_touched_pages_are_selected_and_of_a_read_one_those_in_small_leaves() {
    let profile = Profile {
        faults: runs(&[(600, 8), (0, 1), (2048, 512), (3000, 40)]),
        small_leaves: runs(&[(0, 1), (600, 4), (3000, 40)]),
        written: runs(&[(8, 1), (2050, 1)]),
        ..Profile::default()
    };
    let granules = |read| rule(1, read, Granule::Size16K).granules(&profile);
    let written = [vec![0, 2], (512..640).collect()].concat();
    assert_eq!(
        granules(41),
        written,
        "chunk 0 is written at page 8, chunk 4 is touched as a whole"
    );
    assert_eq!(granules(40), [written.clone(), (750..760).collect()].concat());
    assert_eq!(granules(4), [vec![0, 2, 150], (512..640).collect(), (750..760).collect()].concat());
    assert_eq!(granules(0), [2, 512]);
    // A later run writes to another chunk than the recorded one.
    let used = rule(1, 41, Granule::Size16K).with_read_granules([128].into(), &profile);
    assert_eq!(used, [128, 150, 151]);
}

#[test]
fn granules_are_ascending_and_only_software_page_tables_need_copies_of_read_ones() {
    let profile = Profile {
        written: runs(&[(2048, 600)]),
        small_leaves: runs(&[(512, 600)]),
        ..Profile::default()
    };
    let chunks = |nested| rule(1, 32, Granule::Size2M).for_paging(nested).granules(&profile);
    assert_eq!(chunks(false), [1, 2, 4, 5]);
    assert_eq!(chunks(true), [4, 5]);
}

#[test]
fn every_run_uses_the_read_chunks_of_the_profile() {
    let profile = Profile { small_leaves: runs(&[(512, 512)]), ..Profile::default() };
    let used = rule(1, 32, Granule::Size2M).with_read_granules([0, 3].into(), &profile);
    assert_eq!(used, [0, 1, 3]);
}

#[test]
fn a_rule_is_found_again_by_its_key() {
    for (name, granule) in Granule::NAMES {
        assert_eq!((granule.name(), Granule::of_name(name)), (name, Some(granule)));
        for learn in [true, false] {
            let rule = Rule { learn, ..rule(4, 0, granule) };
            assert_eq!(Rule::of_key(&rule.key()), Some(rule));
        }
    }
    // As firns without granules stored it.
    assert_eq!(Rule::of_key("written=4,read=0"), Some(rule(4, 0, Granule::Size2M)));
    for other in
        ["", "written=4", "written=x,read=0", "read=0,written=4", "written=1,read=2,granule=3"]
    {
        assert_eq!(Rule::of_key(other), None, "{other}");
    }
}

#[test]
fn media_without_private_mappings_get_whole_chunks() {
    assert_eq!(rule(1, 0, Granule::Auto).for_medium(false), rule(1, 0, Granule::Size2M));
    for granule in [Granule::Auto, Granule::Size4K, Granule::Size2M] {
        assert_eq!(rule(1, 0, granule).for_medium(true), rule(1, 0, granule));
    }
}
