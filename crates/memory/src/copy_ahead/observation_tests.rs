use firn_base::PageRange;
use firn_snapshot::{CHUNK_PAGES, CHUNK_SIZE, CopyTable, MemoryLayout};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::FileExt;

use super::*;
use crate::HostFacts;
use crate::copy_ahead::Granule;
use crate::executor::{ExecuteError, Sources, execute};
use crate::plan::Leaf;
use crate::planners::{ExtentFacts, ImageFacts, PlanInput, firn_plan};
use crate::testing::{assert_counted, frozen_chunk};

const CHUNKS: u64 = 6;
const RULE: Rule = Rule { written: 2, read: 0, granule: Granule::Size2M, learn: true };
/// The offset of the extent in its medium.
const OFFSET: u64 = CHUNK_SIZE;

fn byte(chunk: u64) -> u8 {
    u8::try_from(chunk + 1).unwrap()
}

fn memfd(chunks: impl Iterator<Item = u8>) -> File {
    let file = File::from(memfd_create("test", MemfdFlags::empty()).unwrap());
    for (at, byte) in (0..).zip(chunks) {
        file.write_all_at(&vec![byte; usize_of(CHUNK_SIZE)], at * CHUNK_SIZE).unwrap();
    }
    file
}

fn run(first: u64, chunks: u64) -> PageRange {
    PageRange { first: first * CHUNK_PAGES, pages: chunks * CHUNK_PAGES }
}

/// The guest memory of an extent in a medium.
#[derive(Debug)]
struct Extent<'a>(&'a File);

impl ReadAt for Extent<'_> {
    fn size(&self) -> io::Result<u64> {
        Ok(CHUNKS * CHUNK_SIZE)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self.0, buf, OFFSET + offset)
    }
}

/// A sealed extent, and a copy of some of its chunks.
struct World {
    medium: File,
    copies: Copies,
}

impl World {
    /// Chunks 1, 3 and 4 are expected to be written; 1 and 3 are copied.
    fn new() -> Self {
        let medium = memfd([0xee].into_iter().chain((0..CHUNKS).map(byte)));
        let table = CopyTable::new([run(1, 1), run(3, 1)]);
        let file = Some(memfd([1, 3].into_iter().map(byte)));
        let expected = vec![run(1, 1), run(3, 2)];
        Self { medium, copies: Copies { expected, table, file, ..Copies::default() } }
    }

    fn plan(&self) -> Plan {
        let layout = MemoryLayout::for_size(CHUNKS * CHUNK_SIZE).unwrap();
        let extent = ExtentFacts {
            offset: OFFSET,
            leaf: Leaf::Size2M,
            private: true,
            replica: false,
            checked: true,
        };
        let input = PlanInput {
            layout: &layout,
            image: ImageFacts::in_pool(layout.total_bytes(), extent),
            zero_map: &PageSet::new(layout.pages()),
            profile: None,
            snapshot: None,
            copies: None,
            host: &HostFacts::read().unwrap(),
        };
        firn_plan("firn".into(), &input, Some(&self.copies)).unwrap()
    }

    fn restore(&self, copy: Option<&File>) -> GuestMemory {
        let sources = Sources { copy, ..Sources::medium(&self.medium) };
        execute(&self.plan(), &sources).unwrap().memory
    }

    fn report(&self, memory: &GuestMemory) -> WriteReport {
        self.report_by(RULE, memory)
    }

    fn report_by(&self, rule: Rule, memory: &GuestMemory) -> WriteReport {
        observe_extent(memory, &self.plan(), rule, &self.copies, &Extent(&self.medium)).unwrap()
    }
}

fn read(memory: &GuestMemory, page: u64) -> u8 {
    memory.vm_memory().read_obj(GuestAddress(page * 4096 + 9)).unwrap()
}

fn write(memory: &GuestMemory, page: u64, value: u8) {
    memory.vm_memory().write_obj(value, GuestAddress(page * 4096 + 9)).unwrap();
}

#[test]
fn two_guests_of_one_extent_have_separate_copies_and_leave_the_extent_unchanged() {
    let world = World::new();
    let other = memfd([1, 3].into_iter().map(byte));
    let (one, two) = (world.restore(world.copies.file.as_ref()), world.restore(Some(&other)));
    for page in 0..CHUNKS * CHUNK_PAGES {
        assert_eq!(
            [read(&one, page), read(&two, page)],
            [byte(page / CHUNK_PAGES); 2],
            "page {page}"
        );
        write(&one, page, 0x77);
    }
    for page in 0..CHUNKS * CHUNK_PAGES {
        assert_eq!([read(&one, page), read(&two, page)], [0x77, byte(page / CHUNK_PAGES)]);
    }
    let mut byte_of = [0];
    for chunk in 0..CHUNKS {
        FileExt::read_exact_at(&world.medium, &mut byte_of, OFFSET + chunk * CHUNK_SIZE + 9)
            .unwrap();
        assert_eq!(byte_of, [byte(chunk)]);
    }
    let usage = one.usage().unwrap();
    assert_eq!((usage.copies, usage.private), (2 * CHUNK_SIZE, 4 * CHUNK_SIZE));
    assert_eq!(two.usage().unwrap().private, 0);
}

#[test]
fn written_chunks_are_reported_as_predicted_missed_or_unused() {
    let world = World::new();
    let memory = world.restore(world.copies.file.as_ref());
    assert_eq!(world.report(&memory).unused, 3);
    write(&memory, CHUNK_PAGES + 511, 0x77);
    // The rule requires two written pages for a chunk to count.
    write(&memory, 0, 0x77);
    write(&memory, 2 * CHUNK_PAGES, 0x77);
    write(&memory, 2 * CHUNK_PAGES + 7, 0x77);
    let report = world.report(&memory);
    let counts = (report.predicted, report.copied, report.missed, report.unused);
    assert_eq!(counts, (3, 2, 1, 2));
    assert_eq!(report.written, [run(1, 2)]);
}

#[test]
fn runs_of_pages_over_the_extent_are_written_in_place_and_observed_by_granule() {
    let rule = Rule { written: 1, read: 0, granule: Granule::Size16K, learn: true };
    let mut world = World::new();
    let pages = |first, pages| PageRange { first, pages };
    // Two runs in chunk 1, a run over the end of chunk 2, and chunk 4.
    let runs = [pages(520, 4), pages(900, 8), pages(1532, 8), run(4, 1)];
    let table = CopyTable::new(runs);
    let copy = memfd([byte(4)].into_iter());
    for (part, place) in table.parts() {
        for page in 0..part.pages {
            let byte = byte((part.first + page) / CHUNK_PAGES);
            copy.write_all_at(&[byte; 4096], place + page * 4096).unwrap();
        }
    }
    world.copies = Copies { expected: runs.to_vec(), table, file: Some(copy), ..Copies::default() };
    let memory = world.restore(world.copies.file.as_ref());
    for page in 0..CHUNKS * CHUNK_PAGES {
        assert_eq!(read(&memory, page), byte(page / CHUNK_PAGES), "page {page}");
    }
    let report = world.report_by(rule, &memory);
    let counts =
        |report: &WriteReport| (report.predicted, report.copied, report.missed, report.unused);
    assert_eq!((report.granule, counts(&report)), (16 << 10, (133, 133, 0, 133)));
    assert_eq!(memory.usage().unwrap().private, 0);
    // In the copy, beside it, and far from it.
    for page in [523, 903, 904, 1535, 1536, 4 * CHUNK_PAGES + 100, 899, 17, 5 * CHUNK_PAGES] {
        write(&memory, page, 0x77);
    }
    let report = world.report_by(rule, &memory);
    assert_eq!(counts(&report), (133, 133, 3, 133 - 6));
    let granules = [16, 520, 896, 1532, 2148, 2560].map(|first| {
        pages(
            first,
            match first {
                896 => 12,
                1532 => 8,
                _ => 4,
            },
        )
    });
    assert_eq!(report.written, granules);
    let usage = memory.usage().unwrap();
    assert_eq!(usage.private, 3 * 4096, "the kernel copied three pages");
    for page in 0..CHUNKS * CHUNK_PAGES {
        let is_written = [523, 903, 904, 1535, 1536, 2148, 899, 17, 2560].contains(&page);
        let expected = if is_written { 0x77 } else { byte(page / CHUNK_PAGES) };
        assert_eq!(read(&memory, page), expected, "page {page}");
    }
}

#[test]
fn populated_pages_are_private_from_the_start_and_count_as_written_once_they_differ() {
    let rule = Rule { written: 1, read: 0, granule: Granule::Size16K, learn: true };
    let mut world = World::new();
    let pages = |first, pages| PageRange { first, pages };
    let expected = vec![pages(520, 4), pages(1532, 8)];
    let absent = Some(NoCopy::BeingMade);
    world.copies = Copies { key: rule.key(), expected, absent, ..Copies::default() };
    let memory = world.restore(None);
    assert_eq!(memory.usage().unwrap().private, 12 * 4096);
    for page in 0..CHUNKS * CHUNK_PAGES {
        assert_eq!(read(&memory, page), byte(page / CHUNK_PAGES), "page {page}");
    }
    let report = world.report_by(rule, &memory);
    assert_eq!((report.predicted, report.missed, report.unused), (3, 0, 3));
    assert_eq!(report.written, []);
    write(&memory, 1535, 0x77);
    write(&memory, 5 * CHUNK_PAGES, 0x77);
    let report = world.report_by(rule, &memory);
    assert_eq!((report.missed, report.unused), (1, 2));
    assert_eq!(report.written, [pages(1532, 4), pages(5 * CHUNK_PAGES, 4)]);
    assert_eq!(read(&world.restore(None), 1535), byte(2));
}

#[test]
fn discarded_memory_of_a_copy_is_unchanged() {
    assert_counted(&(2 * CHUNK_SIZE), || {
        let world = World::new();
        let memory = world.restore(world.copies.file.as_ref());
        write(&memory, CHUNK_PAGES, 0x77);
        memory.discard(0, CHUNKS * CHUNK_SIZE).unwrap();
        write(&memory, CHUNK_PAGES, 0x78);
        let usage = memory.usage().unwrap();
        assert_eq!((read(&memory, 0), read(&memory, CHUNK_PAGES)), (0, 0x78));
        assert_eq!(usage.private, 0, "nothing in small pages");
        usage.copies
    });
}

#[test]
fn a_missing_or_short_copy_is_refused() {
    let world = World::new();
    let short = memfd([byte(1)].into_iter());
    for (copy, is) in [(None, 0), (Some(&short), CHUNK_SIZE)] {
        let sources = Sources { copy, ..Sources::medium(&world.medium) };
        let refused = execute(&world.plan(), &sources).unwrap_err();
        let ExecuteError::CopyTooShort { len, expected } = refused else { panic!("{refused}") };
        assert_eq!((len, expected), (is, 2 * CHUNK_SIZE));
    }
}

#[test]
fn a_freeze_reads_copied_chunks() {
    let world = World::new();
    let memory = world.restore(world.copies.file.as_ref());
    write(&memory, CHUNK_PAGES, 0x77);
    let pages = memory.pages();
    for chunk in 0..CHUNKS {
        let bytes = frozen_chunk(&pages, chunk * CHUNK_SIZE, CHUNK_SIZE);
        assert_eq!(bytes[9], if chunk == 1 { 0x77 } else { byte(chunk) });
        assert_eq!(bytes[4096 + 9], byte(chunk));
    }
}

#[test]
fn parts_end_where_chunks_do() {
    let cut: Vec<_> = parts(4096..2 * CHUNK_SIZE + 4096, CHUNK_SIZE).collect();
    let ends = [CHUNK_SIZE, 2 * CHUNK_SIZE, 2 * CHUNK_SIZE + 4096];
    assert_eq!(cut.iter().map(|part| part.end).collect::<Vec<_>>(), ends);
    assert_eq!(parts(0..0, CHUNK_SIZE).count(), 0);
}
