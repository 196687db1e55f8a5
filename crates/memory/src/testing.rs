//! Random plans and images for tests.

use std::fmt::Debug;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};

use firn_base::{GuestRange, ImageRange, PAGE_SIZE};
use firn_snapshot::{CopyTable, MemoryLayout, MemoryRegion, PageSet};
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any};
use proptest::sample::{Index, select};

use crate::plan::{
    Advice, Integrity, Layer, Leaf, Plan, Segment, Sharing, Source, Step, When, Work,
};

/// Asserts that a count of mapped or cached pages is the expected one, in one of three attempts. A
/// host may take any page of a file at any time, as `pageout` of DAMON does on some, but not each
/// time. What no host changes, `count` asserts itself.
pub(crate) fn assert_counted<T: PartialEq + Debug>(expected: &T, count: impl FnMut() -> T) {
    let counts: Vec<T> = std::iter::repeat_with(count).take(3).collect();
    assert!(counts.contains(expected), "{counts:?}, not {expected:?}");
}

/// One to three regions of up to 40 pages, at any address.
pub(crate) fn layouts() -> impl Strategy<Value = MemoryLayout> {
    vec((select(vec![0, 1, 3, 512, 700]), 1u64..40), 1..=3).prop_map(|regions| {
        let mut next = 0;
        let regions = regions.into_iter().map(|(gap, pages)| {
            let guest_addr = next + gap * PAGE_SIZE;
            next = guest_addr + pages * PAGE_SIZE;
            MemoryRegion { guest_addr, len: pages * PAGE_SIZE }
        });
        MemoryLayout::new(regions.collect()).unwrap()
    })
}

/// Valid plans: random tilings, realised by overlapping layers whose order matters, over a few
/// layers that are hidden in the end.
pub(crate) fn plans() -> impl Strategy<Value = Plan> {
    layouts().prop_flat_map(|layout| {
        let pages = usize::try_from(layout.pages()).unwrap();
        (
            Just(layout),
            vec(any::<bool>(), pages),
            vec(prop_kind(), pages),
            vec(any::<u64>(), pages),
            vec((any::<Index>(), any::<Index>(), any::<bool>()), 0..4),
            vec((any::<Index>(), any::<bool>(), any::<bool>()), 0..4),
        )
            .prop_map(|(layout, cuts, kinds, order, hidden, steps)| {
                let segments = segments(&layout, &cuts, &kinds);
                let layers = layers(&layout, &segments, &order, &hidden);
                let schedule = schedule(&layout, &segments, &steps);
                let privates = segments.iter().filter(|s| s.sharing == Sharing::PrivateCow);
                let populated = privates.map(|s| s.guest).step_by(2).collect();
                Plan {
                    planner: "random".to_owned(),
                    layout,
                    copies: CopyTable::default(),
                    populated,
                    segments,
                    layers,
                    schedule,
                    pager: None,
                }
            })
    })
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Zero,
    Image,
}

fn prop_kind() -> impl Strategy<Value = Kind> {
    select(vec![Kind::Zero, Kind::Image])
}

/// A segment of this kind.
pub(crate) fn segment(layout: &MemoryLayout, guest: GuestRange, kind: Kind) -> Segment {
    let leaf = Leaf::Size4K;
    match kind {
        Kind::Zero => Segment {
            guest,
            source: Source::Zero,
            sharing: Sharing::Exclusive,
            leaf,
            integrity: Integrity::CheckedOnFill,
        },
        Kind::Image => Segment {
            guest,
            source: Source::Image { offset: layout.image_offset(guest.start).unwrap() },
            sharing: Sharing::PrivateCow,
            leaf,
            integrity: Integrity::Unchecked,
        },
    }
}

/// The layer that realises a segment, over a range that starts at or before the segment.
fn layer(layout: &MemoryLayout, guest: GuestRange, kind: Kind, random: bool) -> Layer {
    let Segment { source, sharing, .. } = segment(layout, guest, kind);
    let advice = if random { Advice::Random } else { Advice::Normal };
    Layer { guest, source, sharing, advice }
}

fn kind_of(source: Source) -> Kind {
    if source == Source::Zero { Kind::Zero } else { Kind::Image }
}

fn segments(layout: &MemoryLayout, cuts: &[bool], kinds: &[Kind]) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for region in layout.regions() {
        for start in region.guest_range().step_by(4096) {
            let page = usize::try_from(layout.image_offset(start).unwrap() / PAGE_SIZE).unwrap();
            match segments.last_mut() {
                Some(last) if start != region.guest_addr && !cuts[page] => {
                    last.guest.len += PAGE_SIZE;
                }
                _ => {
                    let guest = GuestRange { start, len: PAGE_SIZE };
                    segments.push(segment(layout, guest, kinds[page]));
                }
            }
        }
    }
    segments
}

/// Layers in a random order. Each covers its segment, and also adjacent segments of its region
/// whose layers are applied later.
fn layers(
    layout: &MemoryLayout,
    segments: &[Segment],
    order: &[u64],
    hidden: &[(Index, Index, bool)],
) -> Vec<Layer> {
    let mut layers = Vec::new();
    for &(region, len, zero) in hidden {
        let regions: Vec<_> = layout.regions().collect();
        let region = regions[region.index(regions.len())];
        let pages = usize::try_from(region.len / PAGE_SIZE).unwrap();
        let len = (len.index(pages) as u64 + 1) * PAGE_SIZE;
        let guest = GuestRange { start: region.guest_addr, len };
        layers.push(layer(layout, guest, if zero { Kind::Zero } else { Kind::Image }, zero));
    }
    let mut sequence: Vec<usize> = (0..segments.len()).collect();
    sequence.sort_by_key(|&i| (order[i], i));
    let later = |a: usize, b: usize| (order[a], a) > (order[b], b);
    for &i in &sequence {
        let starts_region = |at| layout.regions().any(|region| region.guest_addr == at);
        let touching = |a: usize, b: usize| {
            let end = segments[a].guest.end();
            end == segments[b].guest.start && !starts_region(end)
        };
        let (mut first, mut last) = (i, i);
        while first > 0 && touching(first - 1, first) && later(first - 1, i) {
            first -= 1;
        }
        while last + 1 < segments.len() && touching(last, last + 1) && later(last + 1, i) {
            last += 1;
        }
        let start = segments[first].guest.start;
        let guest = GuestRange { start, len: segments[last].guest.end() - start };
        layers.push(layer(layout, guest, kind_of(segments[i].source), order[i].is_multiple_of(2)));
    }
    layers
}

fn schedule(
    layout: &MemoryLayout,
    segments: &[Segment],
    steps: &[(Index, bool, bool)],
) -> Vec<Step> {
    let pages = usize::try_from(layout.pages()).unwrap();
    let mut schedule: Vec<Step> = steps
        .iter()
        .map(|&(at, preload, after)| {
            let when = if after { When::AfterResume } else { When::BeforeResume };
            let work = if preload {
                let offset = at.index(pages) as u64 * PAGE_SIZE;
                let len = layout.total_bytes() - offset;
                Work::Preload { image: ImageRange { offset, len } }
            } else {
                Work::Index { guest: at.get(segments).guest }
            };
            Step { when, work }
        })
        .collect();
    schedule.extend(layout.regions().map(|region| {
        let guest = GuestRange::from(region.guest_range());
        Step { when: When::BeforeResume, work: Work::Populate { guest } }
    }));
    schedule.sort_by_key(|step| step.when == When::AfterResume);
    schedule
}

/// The bytes of an image page: its number and a seed, never all zero.
pub(crate) fn page_bytes(page: u64, seed: u8) -> Vec<u8> {
    let mut bytes = vec![seed | 1; 4096];
    bytes[..8].copy_from_slice(&page.to_le_bytes());
    bytes
}

/// Writes an image for a plan, and the zero map that goes with it: the pages of its `Zero`
/// segments. These pages hold other bytes than zero in the image, so that a wrong source shows.
pub(crate) fn write_image(plan: &Plan, file: &mut File, seed: u8) -> PageSet {
    let pages = plan.layout.pages();
    file.seek(SeekFrom::Start(0)).unwrap();
    let bytes: Vec<u8> = (0..pages).flat_map(|page| page_bytes(page, seed)).collect();
    file.write_all(&bytes).unwrap();
    let mut zero_map = PageSet::new(pages);
    for segment in plan.segments.iter().filter(|s| s.source == Source::Zero) {
        let first = plan.layout.image_offset(segment.guest.start).unwrap() / PAGE_SIZE;
        zero_map.insert_range(first..first + segment.guest.len / PAGE_SIZE);
    }
    zero_map
}

/// An unnamed file on storage, whose pages can be evicted; `None` where the directory
/// for temporary files is in memory.
pub(crate) fn file_on_a_medium() -> Option<File> {
    let file = tempfile::tempfile().unwrap();
    firn_required::is_on_disk(&file).then_some(file)
}

/// Memory of `layout` whose pages hold [`page_bytes`], or zeros where they are in `zero_map`.
struct Pages<'a> {
    layout: &'a MemoryLayout,
    zero_map: &'a PageSet,
    seed: u8,
}

impl firn_snapshot::PageSource for Pages<'_> {
    fn layout(&self) -> &MemoryLayout {
        self.layout
    }

    fn chunk<'a>(
        &'a self,
        image_offset: u64,
        buf: &'a mut [u8],
    ) -> std::io::Result<firn_snapshot::Chunk<'a>> {
        for (page, bytes) in (image_offset / PAGE_SIZE..).zip(buf.chunks_mut(4096)) {
            if self.zero_map.get(page) {
                bytes.fill(0);
            } else {
                bytes.copy_from_slice(&page_bytes(page, self.seed));
            }
        }
        Ok(firn_snapshot::Chunk::Bytes(buf))
    }
}

/// The bytes of a chunk, or of a part of it, as a freeze reads them.
pub(crate) fn frozen_chunk(
    pages: &impl firn_snapshot::PageSource,
    offset: u64,
    len: u64,
) -> Vec<u8> {
    use firn_snapshot::Chunk;
    let mut buf = vec![0xaa; usize::try_from(len).unwrap()];
    let mut frozen = vec![0; buf.len()];
    let (bytes, content) = match pages.chunk(offset, &mut buf).unwrap() {
        Chunk::Zero => return frozen,
        Chunk::Bytes(bytes) => return bytes.to_vec(),
        Chunk::Pages(bytes, content) => (bytes, content),
    };
    for pages in content {
        let range = pages.start * 4096..pages.end * 4096;
        frozen[range.clone()].copy_from_slice(&bytes[range]);
    }
    frozen
}

/// A snapshot at `path` whose pages hold [`page_bytes`], or zeros where they are in `zero_map`.
pub(crate) fn write_snapshot(
    path: &std::path::Path,
    layout: &MemoryLayout,
    zero_map: &PageSet,
    kind: firn_snapshot::ImageKind,
    seed: u8,
) -> firn_snapshot::Snapshot {
    let id = uuid::Uuid::from_u128(u128::from(seed) + 1);
    freeze_pages(path, &Pages { layout, zero_map, seed }, kind, id, b"state")
}

/// Freezes guest memory into `dir`, and opens the snapshot.
pub(crate) fn freeze(
    memory: &crate::GuestMemory,
    dir: &std::path::Path,
    kind: firn_snapshot::ImageKind,
) -> firn_snapshot::Snapshot {
    freeze_pages(dir, &memory.pages(), kind, uuid::Uuid::new_v4(), &[])
}

fn freeze_pages(
    path: &std::path::Path,
    pages: &dyn firn_snapshot::PageSource,
    kind: firn_snapshot::ImageKind,
    id: uuid::Uuid,
    state: &[u8],
) -> firn_snapshot::Snapshot {
    let machine = firn_snapshot::Machine {
        description: firn_snapshot::Description { id, vcpus: 1, ..Default::default() },
        state_version: 1,
        state: state.to_vec(),
        reported: Vec::new(),
    };
    let request = firn_snapshot::FreezeRequest {
        destination: firn_snapshot::Destination::Directory(path.to_owned()),
        dense: kind == firn_snapshot::ImageKind::Dense,
        function: None,
    };
    firn_snapshot::freeze(&mut firn_snapshot::Contents::new(pages, machine), request).unwrap();
    firn_snapshot::Snapshot::open(path).unwrap()
}
