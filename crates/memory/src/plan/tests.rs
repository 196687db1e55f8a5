use firn_base::{GuestRange, ImageRange};
use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, proptest};
use proptest::sample::Index;

use super::*;
use crate::testing::{Kind, plans, segment};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// A plan of the given kinds, a page each, in one region from 1 MiB up, with a layer for each
/// segment.
fn plan_of(kinds: &[Kind]) -> Plan {
    let regions =
        vec![firn_snapshot::MemoryRegion { guest_addr: MIB, len: kinds.len() as u64 * PAGE }];
    let layout = MemoryLayout::new(regions).unwrap();
    let starts = (MIB..).step_by(4096);
    let segments: Vec<Segment> = starts
        .zip(kinds)
        .map(|(start, &kind)| segment(&layout, GuestRange { start, len: PAGE }, kind))
        .collect();
    let layers = segments
        .iter()
        .map(|s| Layer {
            guest: s.guest,
            source: s.source,
            sharing: s.sharing,
            advice: Advice::Normal,
        })
        .collect();
    Plan {
        planner: "test".to_owned(),
        layout,
        copies: CopyTable::default(),
        populated: Vec::new(),
        segments,
        layers,
        schedule: Vec::new(),
        pager: None,
    }
}

fn image_plan() -> Plan {
    plan_of(&[Kind::Image, Kind::Zero, Kind::Image, Kind::Image])
}

/// The source and sharing of every page, by applying the layers to every page in succession.
fn pages_of_layers(plan: &Plan) -> Vec<(u64, Option<(Source, Sharing)>)> {
    let pages = plan.layout.regions().flat_map(|r| r.guest_range().step_by(4096));
    pages
        .map(|page| {
            let covers = |l: &&Layer| (l.guest.start..l.guest.end()).contains(&page);
            let top = plan.layers.iter().rev().find(covers);
            (page, top.map(|l| (l.source.advanced(page - l.guest.start), l.sharing)))
        })
        .collect()
}

fn pages_of_segments(plan: &Plan) -> Vec<(u64, Option<(Source, Sharing)>)> {
    let mut pages = Vec::new();
    for s in &plan.segments {
        for page in (s.guest.start..s.guest.end()).step_by(4096) {
            pages.push((page, Some((s.source.advanced(page - s.guest.start), s.sharing))));
        }
    }
    pages
}

#[test]
fn a_missing_segment_is_a_gap() {
    let mut plan = image_plan();
    let removed = plan.segments.remove(1);
    assert_eq!(plan.validate(), Err(PlanError::Gap { range: removed.guest }));
    let mut plan = image_plan();
    let removed = plan.segments.pop().unwrap();
    assert_eq!(plan.validate(), Err(PlanError::Gap { range: removed.guest }));
}

#[test]
fn only_private_mappings_are_populated() {
    let range = |page: u64, pages: u64| GuestRange { start: MIB + page * PAGE, len: pages * PAGE };
    let check = |populated: &[GuestRange]| {
        Plan { populated: populated.to_vec(), ..image_plan() }.validate()
    };
    assert_eq!(check(&[range(0, 1), range(2, 1), range(3, 1)]), Ok(()));
    assert_eq!(check(&[range(0, 1), range(2, 2)]), Ok(()), "two segments");
    // Anonymous memory, also in a part of the range; a second time; out of order.
    let refused = |range| Err(PlanError::Populated { range });
    assert_eq!(check(&[range(1, 1)]), refused(range(1, 1)));
    assert_eq!(check(&[range(0, 2)]), refused(range(0, 2)));
    assert_eq!(check(&[range(1, 2)]), refused(range(1, 2)));
    assert_eq!(check(&[range(2, 2), range(3, 1)]), refused(range(3, 1)));
    assert_eq!(check(&[range(2, 1), range(0, 1)]), refused(range(0, 1)));
    let what = "populated range";
    let outside = range(3, 2);
    assert_eq!(check(&[outside]), Err(PlanError::OutsideMemory { what, range: outside }));
}

#[test]
fn segments_out_of_order_are_refused() {
    let mut plan = image_plan();
    plan.segments.swap(2, 3);
    assert_eq!(
        plan.validate(),
        Err(PlanError::Gap { range: GuestRange { start: MIB + 2 * PAGE, len: PAGE } })
    );
    let mut plan = image_plan();
    let first = plan.segments[0];
    plan.segments.push(first);
    assert_eq!(plan.validate(), Err(PlanError::Overlap { range: first.guest }));
}

#[test]
fn ranges_outside_guest_memory_are_refused() {
    for range in [
        GuestRange { start: 0, len: PAGE },
        GuestRange { start: MIB + 3 * PAGE, len: 2 * PAGE },
        GuestRange { start: MIB + 4 * PAGE, len: PAGE },
        GuestRange { start: u64::MAX - PAGE + 1, len: PAGE },
        GuestRange { start: MIB, len: u64::MAX - PAGE + 1 },
    ] {
        let outside = |what| Err(PlanError::OutsideMemory { what, range });
        let mut plan = image_plan();
        plan.layers[0].guest = range;
        assert_eq!(plan.validate(), outside("layer"));
        let mut plan = image_plan();
        let work = Work::Index { guest: range };
        plan.schedule = vec![Step { when: When::AfterResume, work }];
        assert_eq!(plan.validate(), outside("step"));
        let mut plan = image_plan();
        let index = if range.start < MIB + 3 * PAGE { 0 } else { 3 };
        plan.segments[index].guest = range;
        let refused = plan.validate();
        assert!(refused == outside("segment") || matches!(refused, Err(PlanError::Gap { .. })));
    }
}

#[test]
fn ranges_outside_the_image_are_refused() {
    for (offset, len) in [(4 * PAGE, PAGE), (3 * PAGE, 2 * PAGE), (u64::MAX - PAGE + 1, PAGE)] {
        let range = ImageRange { offset, len };
        let mut plan = image_plan();
        let work = Work::Preload { image: range };
        plan.schedule = vec![Step { when: When::BeforeResume, work }];
        let (image_len, what) = (4 * PAGE, "step");
        assert_eq!(plan.validate(), Err(PlanError::OutsideImage { what, range, image_len }));
    }
    let mut plan = image_plan();
    plan.layers[2].source = Source::Image { offset: 4 * PAGE };
    assert!(matches!(plan.validate(), Err(PlanError::OutsideImage { what: "layer", .. })));
}

#[test]
fn empty_and_misaligned_ranges_are_refused() {
    let empty = |what| Err(PlanError::Empty { what, at: MIB });
    let misaligned = |what, at, len| Err(PlanError::Misaligned { what, at, len, align: PAGE });
    let mut plan = image_plan();
    plan.segments[0].guest.len = 0;
    assert_eq!(plan.validate(), empty("segment"));
    let mut plan = image_plan();
    plan.layers[0].guest.len = 0;
    assert_eq!(plan.validate(), empty("layer"));
    let mut plan = image_plan();
    plan.layers[0].guest.len = 1;
    assert_eq!(plan.validate(), misaligned("layer", MIB, 1));
    let mut plan = image_plan();
    plan.segments[0].guest.start += 1;
    assert_eq!(plan.validate(), misaligned("segment", MIB + 1, PAGE));
    let mut plan = image_plan();
    plan.layers[0].source = Source::Image { offset: 1 };
    assert_eq!(plan.validate(), misaligned("layer", 1, PAGE));
}

#[test]
fn a_leaf_requires_alignment_in_guest_memory_and_in_the_source() {
    // 2 MiB from 2 MiB up: aligned in guest memory, and in the image when nothing is below it.
    let aligned = |below: u64| {
        let mut regions = vec![firn_snapshot::MemoryRegion { guest_addr: 2 * MIB, len: 2 * MIB }];
        if below > 0 {
            regions.insert(0, firn_snapshot::MemoryRegion { guest_addr: 0, len: below });
        }
        let layout = MemoryLayout::new(regions).unwrap();
        let mut segments: Vec<Segment> = layout
            .regions()
            .map(|r| GuestRange { start: r.guest_addr, len: r.len })
            .map(|guest| segment(&layout, guest, Kind::Image))
            .collect();
        segments.last_mut().unwrap().leaf = Leaf::Size2M;
        let layers = segments
            .iter()
            .map(|s| Layer {
                guest: s.guest,
                source: s.source,
                sharing: s.sharing,
                advice: Advice::Normal,
            })
            .collect();
        let planner = "test".to_owned();
        Plan {
            planner,
            layout,
            copies: CopyTable::default(),
            populated: Vec::new(),
            segments,
            layers,
            schedule: Vec::new(),
            pager: None,
        }
    };
    assert_eq!(aligned(0).validate(), Ok(()));
    assert_eq!(aligned(2 * MIB).validate(), Ok(()));
    let (what, align) = ("segment's image offset", 2 * MIB);
    assert_eq!(
        aligned(PAGE).validate(),
        Err(PlanError::Misaligned { what, at: PAGE, len: 2 * MIB, align })
    );
    let mut plan = image_plan();
    plan.segments[1].leaf = Leaf::Size1G;
    let (what, at, align) = ("segment", MIB + PAGE, 1024 * MIB);
    assert_eq!(plan.validate(), Err(PlanError::Misaligned { what, at, len: PAGE, align }));
}

#[test]
fn sharing_and_integrity_follow_from_the_source() {
    let mut plan = image_plan();
    plan.segments[0].sharing = Sharing::Exclusive;
    assert!(matches!(plan.validate(), Err(PlanError::Sharing { guest: MIB, .. })));
    let mut plan = image_plan();
    plan.layers[1].sharing = Sharing::PrivateCow;
    assert!(matches!(plan.validate(), Err(PlanError::Sharing { source_kind: Source::Zero, .. })));
    let mut plan = image_plan();
    plan.segments[0].integrity = Integrity::CheckedOnFill;
    assert!(matches!(plan.validate(), Err(PlanError::Integrity { guest: MIB, .. })));
}

#[test]
fn a_wrong_topmost_layer_is_named() {
    // All of memory from the image, and the zero page over it.
    let mut plan = image_plan();
    plan.layers[0].guest.len = 4 * PAGE;
    plan.layers.truncate(2);
    assert_eq!(plan.validate(), Ok(()));
    plan.layers.swap(0, 1);
    assert_eq!(
        plan.validate(),
        Err(PlanError::LayerDiffers {
            range: plan.segments[1].guest,
            layer_source: Source::Image { offset: PAGE },
            layer_sharing: Sharing::PrivateCow,
            segment_source: Source::Zero,
            segment_sharing: Sharing::Exclusive,
        })
    );
    plan.layers.clear();
    assert_eq!(plan.validate(), Err(PlanError::NotMapped { range: plan.segments[0].guest }));
}

#[test]
fn a_schedule_has_the_steps_before_the_resume_first() {
    let mut plan = image_plan();
    let work = Work::Index { guest: plan.segments[0].guest };
    let step = |when| Step { when, work };
    plan.schedule = vec![step(When::BeforeResume), step(When::AfterResume)];
    assert_eq!(plan.validate(), Ok(()));
    plan.schedule.push(step(When::BeforeResume));
    assert_eq!(plan.validate(), Err(PlanError::StepOrder { index: 2 }));
}

#[test]
fn an_unknown_pager_policy_is_refused() {
    let mut plan = image_plan();
    plan.pager = Some("unknown".to_owned());
    assert_eq!(plan.validate(), Err(PlanError::UnknownPager { name: "unknown".to_owned() }));
}

/// Nested layers, each a page shorter at both ends, would take hours if validation were quadratic
/// or worse.
#[test]
fn deeply_nested_layers_validate() {
    let depth = 100_000;
    let pages = 2 * depth;
    let mut plan = plan_of(&vec![Kind::Image; usize::try_from(pages).unwrap()]);
    let nested = |i: u64| {
        let guest = GuestRange { start: MIB + i * PAGE, len: (pages - 2 * i) * PAGE };
        let Segment { source, sharing, .. } = segment(&plan.layout, guest, Kind::Image);
        Layer { guest, source, sharing, advice: Advice::Normal }
    };
    plan.layers = (0..depth).map(nested).collect();
    assert_eq!(plan.validate(), Ok(()));
    plan.layers.reverse();
    assert_eq!(plan.validate(), Ok(()));
}

#[test]
fn the_plan_as_json_and_as_tables() {
    let mut plan = plan_of(&[Kind::Image, Kind::Zero]);
    let image = ImageRange { offset: 0, len: 2 * PAGE };
    plan.schedule = vec![Step { when: When::BeforeResume, work: Work::Preload { image } }];
    let json = serde_json::to_value(&plan).unwrap();
    assert_eq!(
        json["segments"][0],
        serde_json::json!({
            "guest": {"start": MIB, "len": PAGE},
            "source": {"kind": "image", "offset": 0},
            "sharing": "private_cow",
            "leaf": "4KiB",
            "integrity": "unchecked",
        })
    );
    assert_eq!(json["layers"][1]["source"], serde_json::json!({"kind": "zero"}));
    assert_eq!(json["schedule"][0]["work"]["kind"], "preload");
    assert_eq!(json["pager"], serde_json::Value::Null);

    let tables = plan.tables();
    for table in &tables {
        assert!(table.rows.iter().all(|row| row.len() == table.head.len()), "{}", table.title);
    }
    assert_eq!(tables.each_ref().map(|t| t.rows.len()), [2, 2, 1]);
    assert_eq!(
        tables[0].rows[1],
        ["0x101000-0x102000", "4 KiB", "zero", "exclusive", "4 KiB", "checked on fill"]
    );
    let summary = plan.summary();
    assert_eq!((summary.bytes, summary.layers, summary.steps), (2 * PAGE, 2, 1));
    assert_eq!(summary.by_source["zero"], PAGE);
    assert_eq!(summary.by_integrity["unchecked"], PAGE);
}

/// A plan, and the index of one of its segments that another follows in the same region.
fn plans_with_successor() -> impl Strategy<Value = (Plan, usize)> {
    let followed = |plan: &Plan| -> Vec<usize> {
        let pairs = plan.segments.windows(2).enumerate();
        let starts_region = |at| plan.layout.regions().any(|region| region.guest_addr == at);
        pairs.filter(|(_, pair)| !starts_region(pair[1].guest.start)).map(|(i, _)| i).collect()
    };
    plans()
        .prop_filter_map("one segment for each region", move |plan| {
            let candidates = followed(&plan);
            (!candidates.is_empty()).then_some((plan, candidates))
        })
        .prop_flat_map(|(plan, candidates)| (Just(plan), proptest::sample::select(candidates)))
}

proptest! {
    #[test]
    fn random_plans_validate(plan in plans()) {
        prop_assert_eq!(plan.validate(), Ok(()));
        prop_assert_eq!(pages_of_layers(&plan), pages_of_segments(&plan));
        prop_assert_eq!(plan.summary().bytes, plan.layout.total_bytes());
    }

    #[test]
    fn a_shorter_segment_leaves_a_gap(plan in plans(), at in any::<Index>()) {
        let mut plan = plan;
        let index = at.index(plan.segments.len());
        let segment = &mut plan.segments[index];
        segment.guest.len -= PAGE;
        let range = GuestRange { start: segment.guest.end(), len: PAGE };
        let expected = if segment.guest.len == 0 {
            PlanError::Empty { what: "segment", at: segment.guest.start }
        } else {
            PlanError::Gap { range }
        };
        prop_assert_eq!(plan.validate(), Err(expected));
    }

    #[test]
    fn a_longer_segment_overlaps((plan, index) in plans_with_successor()) {
        let mut plan = plan;
        plan.segments[index].guest.len += PAGE;
        let range = plan.segments[index + 1].guest;
        prop_assert_eq!(plan.validate(), Err(PlanError::Overlap { range }));
    }

    #[test]
    fn bytes_of_another_page_are_refused(plan in plans(), at in any::<Index>(), by in 1..9u64) {
        let mut plan = plan;
        let index = at.index(plan.segments.len());
        if let Source::Image { offset: expected } = plan.segments[index].source {
            let (guest, offset) = (plan.segments[index].guest.start, expected + by * PAGE);
            plan.segments[index].source = Source::Image { offset };
            let wrong = PlanError::WrongImageOffset { guest, offset, expected };
            prop_assert_eq!(plan.validate(), Err(wrong));
        }
    }

    #[test]
    fn the_most_mappings_are_those_after_one_of_the_layers(plan in plans()) {
        let after = (1..=plan.layers.len()).map(|layers| flatten::flatten(&plan.layers[..layers]).len());
        prop_assert_eq!(plan.most_mappings(), after.max().unwrap_or(0) as u64);
    }

    /// Changed layers are accepted exactly where every page still has its source and sharing.
    #[test]
    fn layers_flatten_to_the_segments(
        plan in plans(),
        swaps in proptest::collection::vec((any::<Index>(), any::<Index>()), 0..4),
        removed in proptest::option::of(any::<Index>()),
        shifted in proptest::option::of((any::<Index>(), 1..4u64)),
    ) {
        let mut plan = plan;
        let pages = plan.layout.pages();
        let layers = &mut plan.layers;
        for (a, b) in swaps {
            let (a, b) = (a.index(layers.len()), b.index(layers.len()));
            layers.swap(a, b);
        }
        if let Some(index) = removed {
            layers.remove(index.index(layers.len()));
        }
        if let Some((index, by)) = shifted.filter(|_| !layers.is_empty()) {
            let index = index.index(layers.len());
            let layer = &mut layers[index];
            if let Source::Image { offset } = &mut layer.source {
                let last = pages * PAGE - layer.guest.len;
                *offset = (*offset + by * PAGE).min(last);
            }
        }
        let right = pages_of_layers(&plan) == pages_of_segments(&plan);
        match plan.validate() {
            Ok(()) => prop_assert!(right),
            Err(PlanError::NotMapped { range }) => {
                let pages = pages_of_layers(&plan);
                let page = pages.iter().find(|(page, _)| *page == range.start).unwrap();
                prop_assert_eq!(page.1, None);
            }
            Err(PlanError::LayerDiffers { range, layer_source, layer_sharing, .. }) => {
                let pages = pages_of_layers(&plan);
                let page = pages.iter().find(|(page, _)| *page == range.start).unwrap();
                prop_assert_eq!(page.1, Some((layer_source, layer_sharing)));
                prop_assert!(!right);
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}
