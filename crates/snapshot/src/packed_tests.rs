use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use firn_base::PageRange;
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

use super::*;
use crate::tests::support::{
    Memory, description, destination, freeze, freeze_generation, names_in, open_generation,
};
use crate::{AttachError, Description, ImageKind, Snapshot, pack};

const KIND: PackedFile = PackedFile::LoadingSet;

fn run(first: u64, pages: u64) -> PageRange {
    PageRange { first, pages }
}

/// Sixteen pages with different bytes; page 3 is zero.
fn freeze_distinct(path: &Path, kind: ImageKind) {
    let mut memory = Memory::zeroed(16);
    for page in (0..16).filter(|page| *page != 3) {
        memory.fill(page, u8::try_from(page).unwrap() + 1);
    }
    let description = Description { id: Uuid::from_u128(9), ..description() };
    freeze(path, &mut memory, kind, None, description, b"state");
}

fn open_packed(path: &Path) -> Result<Vec<PackedRun>, PackedError> {
    let snapshot = Snapshot::open(path).unwrap();
    Ok(snapshot.packed(KIND)?.unwrap().runs().to_vec())
}

#[test]
fn pages_are_stored_in_the_order_of_the_table() {
    for kind in [ImageKind::Sparse, ImageKind::Dense] {
        let (_dir, path) = destination();
        freeze_distinct(&path, kind);
        pack(&Snapshot::open(&path).unwrap(), KIND, 77, &[run(9, 2), run(2, 3)]).unwrap();
        let snapshot = Snapshot::open(&path).unwrap();
        assert!(snapshot.opened_packed(KIND).is_none());
        let packed = snapshot.packed(KIND).unwrap().unwrap();
        assert_eq!(packed.recipe(), 77);
        assert_eq!(packed.data(), 8192..8192 + 5 * 4096);
        let runs: Vec<_> = packed.runs().iter().map(|p| (p.run, p.offset)).collect();
        assert_eq!(runs, [(run(9, 2), 8192), (run(2, 3), 16384)]);
        let firsts: Vec<u8> = (0..5)
            .map(|page| {
                let mut byte = [0];
                packed.file().read_exact_at(&mut byte, 8192 + page * 4096).unwrap();
                byte[0]
            })
            .collect();
        assert_eq!(firsts, [10, 11, 3, 0, 5]);
        assert!(packed.holds(8192, 9 * 4096, 8192));
        assert!(packed.holds(12288, 10 * 4096, 4096));
        assert!(!packed.holds(12288, 10 * 4096, 8192), "the next page belongs to another run");
        assert!(!packed.holds(12288, 9 * 4096, 4096));
        assert!(!packed.holds(0, 9 * 4096, 4096));
        assert!(!packed.holds(8192, 9 * 4096, u64::MAX - 4095));
        assert!(snapshot.opened_packed(KIND).is_some());
        assert!(snapshot.packed(PackedFile::WorkingSet).unwrap().is_none());
    }
}

/// What reads working sets opens nothing: the second open file of the same file bypasses the page
/// cache, where the file system has such reads.
#[test]
fn working_sets_are_open_for_direct_reads() {
    let (_dir, path) = destination();
    freeze_distinct(&path, ImageKind::Sparse);
    for kind in PackedFile::ALL {
        pack(&Snapshot::open(&path).unwrap(), kind, 77, &[run(9, 2)]).unwrap();
    }
    let snapshot = Snapshot::open(&path).unwrap();
    for kind in PackedFile::ALL {
        let packed = snapshot.packed(kind).unwrap().unwrap();
        let mut options = fs::OpenOptions::new();
        options.read(true).custom_flags(OFlags::DIRECT.bits().cast_signed());
        let direct = options.open(packed.path()).is_ok() && kind != PackedFile::LoadingSet;
        assert_eq!(packed.direct().is_some(), direct, "{kind:?}");
        let file = packed.direct().unwrap_or(packed.file()).metadata().unwrap();
        assert_eq!(file.ino(), fs::metadata(packed.path()).unwrap().ino());
        assert!(!fcntl_getfl(packed.file()).unwrap().contains(OFlags::DIRECT));
    }
}

#[test]
fn a_packed_file_is_removed_with_its_snapshot() {
    let (dir, path) = destination();
    freeze_generation(&path, 3);
    assert!(Snapshot::open(&path).unwrap().packed(KIND).unwrap().is_none());
    for runs in [vec![run(15, 1)], vec![]] {
        pack(&Snapshot::open(&path).unwrap(), KIND, 1, &runs).unwrap();
        assert_eq!(open_packed(&path).unwrap().len(), runs.len());
    }
    freeze_generation(&path, 4);
    assert_eq!(open_generation(&path), 4);
    assert_eq!(names_in(&path), ["memory.img", "overlay.img", "snapshot.firn"]);
    assert_eq!(names_in(dir.path()), ["snapshot"]);
}

#[test]
fn a_file_of_another_snapshot_or_kind_is_refused() {
    let (dir, path) = destination();
    freeze_generation(&path, 3);
    pack(&Snapshot::open(&path).unwrap(), KIND, 1, &[run(15, 1)]).unwrap();
    let other = dir.path().join("other");
    freeze_generation(&other, 4);
    fs::copy(path.join(KIND.name()), other.join(KIND.name())).unwrap();
    assert!(matches!(open_packed(&other), Err(PackedError::OtherSnapshot { .. })));
    fs::copy(path.join(KIND.name()), path.join(PackedFile::WorkingSet.name())).unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    assert!(matches!(snapshot.packed(PackedFile::WorkingSet), Err(PackedError::Malformed { .. })));
}

#[test]
fn a_failed_pack_changes_nothing() {
    let (_dir, path) = destination();
    freeze_distinct(&path, ImageKind::Sparse);
    for runs in [vec![run(15, 2)], vec![run(1, 0)], vec![run(1, 2), run(2, 1)]] {
        assert!(
            matches!(
                pack(&Snapshot::open(&path).unwrap(), KIND, 1, &runs),
                Err(AttachError::Table { .. })
            ),
            "{runs:?}"
        );
    }
    // A damaged page is not packed.
    let image = fs::OpenOptions::new().write(true).open(path.join("memory.img")).unwrap();
    image.write_all_at(b"damage", 5 * 4096).unwrap();
    pack(&Snapshot::open(&path).unwrap(), KIND, 1, &[run(5, 1)]).unwrap_err();
    assert_eq!(names_in(&path), ["memory.img", "snapshot.firn"]);
}

#[test]
fn a_file_of_another_length_is_refused() {
    let (_dir, path) = destination();
    freeze_distinct(&path, ImageKind::Sparse);
    pack(&Snapshot::open(&path).unwrap(), KIND, 1, &[run(4, 2)]).unwrap();
    let file = fs::OpenOptions::new().write(true).open(path.join(KIND.name())).unwrap();
    let len = file.metadata().unwrap().len();
    for wrong in [len - 4096, len + 4096, 4096, 100, 0] {
        file.set_len(wrong).unwrap();
        open_packed(&path).unwrap_err();
    }
}

/// A packed file with correct CRCs and this table.
fn forged(id: Uuid, table: &[PageRange], pages: u64) -> Vec<u8> {
    let bytes: Vec<u8> = table
        .iter()
        .flat_map(|r| [r.first.to_le_bytes(), r.pages.to_le_bytes()].concat())
        .collect();
    let mut file = Vec::new();
    file.extend(MAGIC);
    file.extend(VERSION.to_le_bytes());
    file.extend(KIND.code().to_le_bytes());
    file.extend(id.as_bytes());
    file.extend(1u64.to_le_bytes());
    file.extend((table.len() as u64).to_le_bytes());
    file.extend(crc32fast::hash(&bytes).to_le_bytes());
    file.extend([0; 4]);
    file.extend(crc32fast::hash(&file).to_le_bytes());
    file.resize(4096, 0);
    file.extend(bytes);
    let len = data_start(table.len() as u64) + pages * 4096;
    file.resize(usize::try_from(len).unwrap(), 7);
    file
}

#[test]
fn an_invalid_table_with_a_correct_crc_is_refused() {
    let (_dir, path) = destination();
    freeze_distinct(&path, ImageKind::Sparse);
    let id = Uuid::from_u128(9);
    let file = path.join(KIND.name());
    fs::write(&file, forged(id, &[run(4, 2)], 2)).unwrap();
    assert_eq!(open_packed(&path).unwrap().len(), 1);
    let tables =
        [vec![run(15, 2)], vec![run(4, 0)], vec![run(4, 2), run(5, 1)], vec![run(4, u64::MAX)]];
    for table in tables {
        fs::write(&file, forged(id, &table, 2)).unwrap();
        assert!(matches!(open_packed(&path), Err(PackedError::Table { .. })), "{table:?}");
    }
    fs::write(&file, forged(id, &vec![run(1, 1); 17], 2)).unwrap();
    assert!(matches!(open_packed(&path), Err(PackedError::Malformed { .. })));
}

proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(64))]
    #[test]
    fn every_changed_byte_of_header_or_table_is_refused(at in 0usize..92, flip in 1u8..) {
        let (_dir, path) = destination();
        freeze_distinct(&path, ImageKind::Sparse);
        pack(&Snapshot::open(&path).unwrap(), KIND, 1, &[run(4, 2), run(1, 1)]).unwrap();
        let file = path.join(KIND.name());
        let mut bytes = fs::read(&file).unwrap();
        // The header's 60 bytes, then the table's 32.
        bytes[if at < 60 { at } else { 4096 + at - 60 }] ^= flip;
        fs::write(&file, bytes).unwrap();
        prop_assert!(open_packed(&path).is_err());
    }

    #[test]
    fn files_of_random_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..9000)) {
        let (_dir, path) = destination();
        freeze_distinct(&path, ImageKind::Sparse);
        fs::write(path.join(KIND.name()), bytes).unwrap();
        prop_assert!(open_packed(&path).is_err());
    }

    #[test]
    fn every_page_is_where_the_table_places_it(firsts in proptest::sample::subsequence((0..16u64).collect::<Vec<_>>(), 1..16)) {
        let (_dir, path) = destination();
        freeze_distinct(&path, ImageKind::Dense);
        let runs: Vec<PageRange> = firsts.iter().rev().map(|first| run(*first, 1)).collect();
        pack(&Snapshot::open(&path).unwrap(), KIND, 1, &runs).unwrap();
        let snapshot = Snapshot::open(&path).unwrap();
        let packed = snapshot.packed(KIND).unwrap().unwrap();
        for placed in packed.runs() {
            let (mut is, mut should_be) = ([0; 4096], [0; 4096]);
            packed.file().read_exact_at(&mut is, placed.offset).unwrap();
            snapshot.image_file().unwrap().read_exact_at(&mut should_be, placed.run.first * 4096).unwrap();
            prop_assert_eq!(is, should_be);
            prop_assert!(packed.holds(placed.offset, placed.run.first * 4096, 4096));
        }
    }
}

#[test]
fn verify_checks_packed_files() {
    let (_dir, path) = destination();
    freeze_distinct(&path, ImageKind::Sparse);
    assert_eq!(crate::verify(&path, &mut |_, _| ()).unwrap().packed_pages, 0);
    pack(&Snapshot::open(&path).unwrap(), KIND, 77, &[run(9, 2), run(2, 3)]).unwrap();
    assert_eq!(crate::verify(&path, &mut |_, _| ()).unwrap().packed_pages, 5);
    let file = path.join(KIND.name());
    let whole = fs::read(&file).unwrap();
    let page = "loading-set.img: 1 damaged pages, the first is page 0xa";
    for (at, expected) in [(8192 + 4096 + 7, page), (3, "it is not a packed file of firn")] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&file, bytes).unwrap();
        let error = crate::verify(&path, &mut |_, _| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
