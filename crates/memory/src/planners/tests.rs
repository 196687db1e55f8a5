use firn_base::ImageRange;
use proptest::prelude::{prop_assert_eq, proptest};

use super::*;
use crate::plan::{Advice, Integrity, Leaf, Sharing, Source, Work};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A plan for a guest of this size, for an image without holes.
fn plan(planner: &str, size: u64) -> Result<Plan, PlannerError> {
    with_input(size, size, |input| parse(planner).unwrap().plan(input))
}

fn with_input<T>(size: u64, stored: u64, f: impl FnOnce(&PlanInput<'_>) -> T) -> T {
    let layout = MemoryLayout::for_size(size).unwrap();
    let mut host = HostFacts::read().unwrap();
    host.memory_total = 16 * GIB;
    let zero_map = PageSet::new(layout.pages());
    let image = ImageFacts { len: size, stored, ..ImageFacts::default() };
    f(&PlanInput {
        layout: &layout,
        image,
        zero_map: &zero_map,
        profile: None,
        snapshot: None,
        copies: None,
        host: &host,
    })
}

fn refused(written: &str) -> String {
    parse(written).err().unwrap().to_string()
}

#[test]
fn plans_grow_with_regions_and_not_with_guest_memory() {
    for planner in ["firecracker", "firecracker:readahead=off", "dram_cached"] {
        for (size, regions) in [(256 * MIB, 1), (2 * GIB, 1), (8 * GIB, 2)] {
            let plan = plan(planner, size).unwrap();
            assert_eq!(plan.validate(), Ok(()));
            assert_eq!((plan.segments.len(), plan.layers.len()), (regions, regions));
            assert!(plan.schedule.len() <= 1);
        }
    }
}

#[test]
fn firecracker_maps_the_image_privately_and_pages_on_demand() {
    let on = plan("firecracker", 4 * GIB).unwrap();
    assert_eq!(on.planner, "firecracker:readahead=on");
    assert!(on.schedule.is_empty() && on.pager.is_none());
    assert!(on.layers.iter().all(|layer| layer.advice == Advice::Normal));
    assert_eq!(on.layers[1].guest.start, 4 * GIB);
    assert_eq!(on.layers[1].source, Source::Image { offset: 3 * GIB });
    let off = plan("firecracker:readahead=off", 4 * GIB).unwrap();
    assert!(off.layers.iter().all(|layer| layer.advice == Advice::Random));
    assert_eq!(on.segments, off.segments);
}

#[test]
fn dram_cached_is_firecracker_with_the_image_preloaded() {
    let cached = plan("dram_cached", 4 * GIB).unwrap();
    let firecracker = plan("firecracker", 4 * GIB).unwrap();
    assert_eq!((&cached.segments, &cached.layers), (&firecracker.segments, &firecracker.layers));
    let image = ImageRange { offset: 0, len: 4 * GIB };
    let [step] = cached.schedule[..] else { panic!("{:?}", cached.schedule) };
    assert_eq!((step.when, step.work), (crate::When::BeforeResume, Work::Preload { image }));
}

#[test]
fn vanilla_dax_is_firecracker_restricted_to_dax_file_systems() {
    let refused = plan("vanilla_dax", GIB).unwrap_err();
    assert_eq!(refused, PlannerError::NoDax { planner: "vanilla_dax".to_owned() });
    let plan = with_input(GIB, GIB, |input| {
        let image = ImageFacts { dax: true, ..input.image };
        parse("vanilla_dax").unwrap().plan(&PlanInput { image, ..*input }).unwrap()
    });
    assert_eq!(plan.validate(), Ok(()));
    assert_eq!(
        plan,
        Plan { planner: "vanilla_dax".to_owned(), ..self::plan("firecracker", GIB).unwrap() }
    );
}

#[test]
fn a_preloaded_plan_differs_only_in_its_preload() {
    for planner in ["firecracker:readahead=off", "dram_cached"] {
        let whole = plan(planner, GIB).unwrap();
        let without =
            with_input(GIB, GIB, |input| Preloaded(parse(planner).unwrap()).plan(input).unwrap());
        assert_eq!(without, Plan { schedule: Vec::new(), ..whole });
        assert_eq!(without.validate(), Ok(()));
    }
    assert_eq!(Preloaded(parse("pass").unwrap()).store(), Store::Replica);
}

#[test]
fn an_image_larger_than_dram_is_refused() {
    let (needed, total) = (16 * GIB + 1, 16 * GIB);
    let planner = "dram_cached".to_owned();
    let refused = PlannerError::TooLittleMemory { planner, needed, total };
    with_input(32 * GIB, needed, |input| {
        assert_eq!(DramCached.plan(input), Err(refused.clone()));
        let selection = select("all", input).unwrap();
        let names: Vec<_> = selection.planners.iter().map(|p| p.name()).collect();
        assert_eq!(names, ["firecracker:readahead=on", "firecracker:readahead=off"]);
        assert_eq!(selection.left_out[0], ("dram_cached".to_owned(), refused));
        let others: Vec<_> = selection.left_out[1..].iter().map(|(name, _)| &name[..]).collect();
        let expected = [
            "vanilla_dax",
            "faasnap:merge=32",
            "snapbpf",
            "reap:granule=1",
            "faast:granule=1",
            "pass",
            "pass_shared",
            "firn:copy=1,read=32,granule=2m,learn=on",
        ];
        assert_eq!(others, expected);
        // A named planner is selected, and its error is reported with the plan.
        assert_eq!(select("dram_cached", input).unwrap().planners.len(), 1);
    });
    with_input(32 * GIB, total, |input| assert!(DramCached.plan(input).is_ok()));
}

#[test]
fn lists_select_planners() {
    with_input(MIB, MIB, |input| {
        let names = |list: &str| -> Vec<String> {
            select(list, input).unwrap().planners.iter().map(|p| p.name()).collect()
        };
        let (on, off) = ("firecracker:readahead=on", "firecracker:readahead=off");
        assert_eq!(names("all"), [on, off, "dram_cached"]);
        assert_eq!(names("dram_cached,firecracker:readahead=off"), ["dram_cached", off]);
        assert_eq!(names("firecracker,firecracker"), [on, on]);
        let error = select("firecracker:readahead=off,readahead=on", input).err().unwrap();
        assert_eq!(error.to_string(), "option readahead of planner firecracker is given twice");
        assert!(select("", input).is_err());
        assert!(select("all,nothing", input).is_err());
    });
}

#[test]
fn errors_list_the_known_names_options_and_values() {
    assert_eq!(
        refused("firecraker"),
        "unknown planner \"firecraker\"; use one of firecracker, dram_cached, vanilla_dax, faasnap, snapbpf, \
         reap, faast, pass, pass_shared, firn"
    );
    assert_eq!(
        refused("firecracker:ra=off"),
        "planner firecracker has no option \"ra\"; it takes readahead=on|off"
    );
    assert_eq!(
        refused("firecracker:readahead=maybe"),
        "option readahead of planner firecracker cannot be \"maybe\"; use on or off"
    );
    assert_eq!(
        refused("firecracker:readahead"),
        "option readahead of planner firecracker cannot be \"\"; use on or off"
    );
    for wrong in ["x", "", "-1", "+1", "1048577", "99999999999999999999"] {
        assert_eq!(
            refused(&format!("faasnap:merge={wrong}")),
            format!("option merge of planner faasnap cannot be {wrong:?}; use 0 to 1048576")
        );
    }
    assert_eq!(
        refused("faasnap:gap=1"),
        "planner faasnap has no option \"gap\"; it takes merge=0 to 1048576, paging=on|off, regions=on|off, \
         loading_set=on|off"
    );
    assert_eq!(
        refused("dram_cached:preload=no"),
        "planner dram_cached has no option \"preload\"; it takes none"
    );
}

#[test]
fn names_are_parsed_to_the_same_planner() {
    for entry in [
        "firecracker",
        "firecracker:readahead=off",
        "dram_cached",
        "faasnap:merge=0",
        "reap:granule=64",
        "faast",
    ] {
        let name = parse(entry).unwrap().name();
        assert!(name.starts_with(entry));
        assert_eq!(parse(&name).unwrap().name(), name);
    }
}

proptest! {
    #[test]
    fn any_text_is_parsed_or_refused(text in "(firecracker|dram_cached|.{0,12})[:,=]?(readahead|.{0,9})[=]?(on|off|.{0,4})") {
        if let Ok(planner) = parse(&text) {
            prop_assert_eq!(parse(&planner.name()).unwrap().name(), planner.name());
        }
        with_input(MIB, MIB, |input| drop(select(&text, input)));
    }
}

/// A plan for a guest of this size at offset 64 MiB of a pool's medium.
fn plan_in_pool(planner: &str, size: u64, facts: ExtentFacts) -> Result<Plan, PlannerError> {
    let layout = MemoryLayout::for_size(size).unwrap();
    let zero_map = PageSet::new(layout.pages());
    let image = ImageFacts::in_pool(size, facts);
    let host = HostFacts::read().unwrap();
    let input = PlanInput {
        layout: &layout,
        image,
        zero_map: &zero_map,
        profile: None,
        snapshot: None,
        copies: None,
        host: &host,
    };
    parse(planner).unwrap().plan(&input)
}

const EXTENT: ExtentFacts = ExtentFacts {
    offset: 64 * MIB,
    leaf: Leaf::Size2M,
    private: true,
    replica: true,
    checked: true,
};

#[test]
fn pool_planners_map_the_extent_and_index_all_of_it_before_the_resume() {
    for (planner, sharing) in [("pass", Sharing::Exclusive), ("pass_shared", Sharing::PrivateCow)] {
        let plan = plan_in_pool(planner, 4 * GIB + 4096, EXTENT).unwrap();
        assert_eq!(plan.validate(), Ok(()));
        assert!(plan.segments.iter().all(|segment| segment.sharing == sharing));
        assert!(plan.segments.iter().all(|s| s.integrity == Integrity::CheckedAtSeal));
        let leaves: Vec<_> = plan.segments.iter().map(|s| (s.guest.len, s.leaf)).collect();
        let expected = [(3 * GIB, Leaf::Size2M), (GIB, Leaf::Size2M), (4096, Leaf::Size4K)];
        assert_eq!(leaves, expected);
        assert_eq!(plan.segments[1].source, Source::Extent { offset: 64 * MIB + 3 * GIB });
        assert_eq!(plan.layers.len(), 2);
        let indexed: u64 = plan
            .schedule
            .iter()
            .map(|step| match (step.when, step.work) {
                (crate::When::BeforeResume, Work::Index { guest }) => guest.len,
                other => panic!("{other:?}"),
            })
            .sum();
        assert_eq!(indexed, 4 * GIB + 4096);
    }
}

#[test]
fn an_extent_on_a_device_is_mapped_shared() {
    let device = ExtentFacts { private: false, ..EXTENT };
    let plan = plan_in_pool("pass_shared", 4 * GIB, device).unwrap();
    assert_eq!(plan.validate(), Ok(()));
    assert!(plan.segments.iter().all(|s| (s.sharing, s.leaf) == (Sharing::Shared, Leaf::Size2M)));
    let odd = plan_in_pool("pass_shared", 4 * GIB + 4096, device).unwrap_err().to_string();
    assert!(odd.contains("whole chunks"), "{odd}");
}

#[test]
fn an_unverified_extent_is_unchecked() {
    let unchecked = ExtentFacts { checked: false, ..EXTENT };
    for planner in ["pass", "pass_shared"] {
        let plan = plan_in_pool(planner, 64 * MIB, unchecked).unwrap();
        assert_eq!(plan.validate(), Ok(()));
        assert!(plan.segments.iter().all(|s| s.integrity == Integrity::Unchecked));
    }
}

#[test]
fn the_kernel_checks_an_image_that_fs_verity_protects() {
    for protected in [true, false] {
        let plan = with_input(64 * MIB, 64 * MIB, |input| {
            let image = ImageFacts { protected, ..input.image };
            parse("firecracker").unwrap().plan(&PlanInput { image, ..*input }).unwrap()
        });
        assert_eq!(plan.validate(), Ok(()));
        let expected = Integrity::of_file(protected);
        assert!(plan.segments.iter().all(|segment| segment.integrity == expected));
        assert_eq!(expected.to_string() == "checked by the kernel", protected);
    }
}

#[test]
fn a_leaf_requires_an_aligned_extent() {
    let misplaced = ExtentFacts { offset: 64 * MIB + 4096, ..EXTENT };
    let plan = plan_in_pool("pass_shared", 64 * MIB, misplaced).unwrap();
    assert_eq!(plan.validate(), Ok(()));
    assert_eq!(plan.segments[0].leaf, Leaf::Size4K);
    let giant = ExtentFacts { offset: 2 * GIB, leaf: Leaf::Size1G, ..EXTENT };
    let plan = plan_in_pool("pass_shared", 2 * GIB, giant).unwrap();
    assert_eq!(plan.segments[0].leaf, Leaf::Size1G);
}

#[test]
fn errors_name_the_missing_requirement() {
    let sealed = ExtentFacts { replica: false, ..EXTENT };
    let giant = ExtentFacts { private: false, leaf: Leaf::Size1G, ..EXTENT };
    let misplaced = ExtentFacts { private: false, offset: 4096, ..EXTENT };
    for (planner, facts, words) in [
        ("pass", sealed, "replica"),
        ("pass_shared", giant, "--align=2M"),
        ("pass_shared", misplaced, "chunks of 2 MiB"),
        ("firecracker", EXTENT, "in a pool"),
        ("dram_cached", EXTENT, "in a pool"),
    ] {
        let refused = plan_in_pool(planner, 64 * MIB, facts).unwrap_err().to_string();
        assert!(refused.contains(words), "{planner}: {refused}");
    }
    for planner in ["pass", "pass_shared"] {
        let refused = plan(planner, 64 * MIB).unwrap_err().to_string();
        assert!(refused.contains("freeze it into a pool"), "{planner}: {refused}");
    }
}
