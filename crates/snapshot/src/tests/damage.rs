//! Damaged snapshots are refused, and the error names the kind of damage.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use firn_base::PAGE_SIZE;
use proptest::prelude::{any, prop_assert, proptest};
use proptest::test_runner::Config;
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::support::{Memory, description, destination, freeze, freeze_generation};
use crate::container::{HEADER_LEN, Header};
use crate::section::Section;
use crate::{ImageKind, OpenError, Problem, Snapshot, VerifyError, verify};

fn open_error(path: &Path) -> OpenError {
    Snapshot::open(path).unwrap_err()
}

fn problems(path: &Path) -> Vec<Problem> {
    match verify(path, &mut |_, _| ()).unwrap_err() {
        VerifyError::Damaged { problems, .. } => problems,
        VerifyError::Open(error) => vec![error.into()],
    }
}

fn flip(path: &Path, offset: u64, mask: u8) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ mask], offset).unwrap();
}

/// Whether the snapshot opens and verifies. `verify` must refuse every snapshot that `open`
/// refuses.
fn passes(path: &Path) -> bool {
    let opens = Snapshot::open(path).is_ok();
    let verifies = verify(path, &mut |_, _| ()).is_ok();
    assert!(opens || !verifies);
    opens && verifies
}

#[test]
fn every_flipped_bit_of_the_container_is_found() {
    let (_dir, path) = destination();
    freeze_generation(&path, 1);
    let container = path.join("snapshot.firn");
    let good = fs::read(&container).unwrap();
    let header = Header::read(&fs::File::open(&container).unwrap(), &container).unwrap();
    let digests_start = header.range(Section::Digests).start;
    for offset in 0..good.len() {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[offset] ^= 1 << bit;
            fs::write(&container, &bad).unwrap();
            let opens = Snapshot::open(&path).is_ok();
            assert_eq!(opens, offset as u64 >= digests_start, "bit {bit} of byte {offset}");
            assert!(!passes(&path), "bit {bit} of byte {offset}");
        }
    }
}

#[test]
fn truncated_and_extended_files_are_refused() {
    let (_dir, path) = destination();
    freeze_generation(&path, 1);
    for name in ["snapshot.firn", "memory.img", "overlay.img"] {
        let file = path.join(name);
        let good = fs::read(&file).unwrap();
        let step = if good.len() > 4096 { 61 } else { 1 };
        for len in (0..good.len()).step_by(step).chain([good.len() - 1]) {
            fs::write(&file, &good[..len]).unwrap();
            assert!(
                matches!(open_error(&path), OpenError::Truncated { actual, .. } if actual == len as u64),
                "{name} cut to {len} bytes"
            );
            assert!(!passes(&path), "{name} cut to {len} bytes");
        }
        let mut long = good.clone();
        long.push(0);
        fs::write(&file, &long).unwrap();
        assert!(matches!(open_error(&path), OpenError::TooLong { .. }), "{name}");
        assert!(!passes(&path), "{name}");
        fs::write(&file, &good).unwrap();
    }
    assert!(passes(&path));
}

#[test]
fn the_error_names_the_damaged_section() {
    let (_dir, path) = destination();
    freeze_generation(&path, 1);
    let container = path.join("snapshot.firn");
    let header = Header::read(&fs::File::open(&container).unwrap(), &container).unwrap();
    let damaged_at = |offset: u64| {
        flip(&container, offset, 1);
        let error = open_error(&path);
        flip(&container, offset, 1);
        match error {
            OpenError::Damaged { section, .. } => section,
            error => panic!("{error}"),
        }
    };
    assert_eq!(damaged_at(HEADER_LEN as u64 - 1), Section::Header);
    for section in [Section::Manifest, Section::MachineState, Section::ZeroMap] {
        assert_eq!(damaged_at(header.range(section).start), section);
    }
    for section in Section::TABLE {
        let (range, good) = (header.range(section), fs::read(&container).unwrap());
        if !range.is_empty() {
            let cut = usize::try_from(range.end).unwrap() - 1;
            fs::write(&container, &good[..cut]).unwrap();
            let error = open_error(&path);
            let OpenError::Truncated { section: found, .. } = error else { panic!("{error}") };
            assert_eq!(found, Some(section));
            fs::write(&container, &good).unwrap();
        }
    }
}

#[test]
fn damaged_digests_affect_only_their_chunk() {
    let (_dir, path) = destination();
    let mut memory = Memory::zeroed(1024);
    memory.fill(0, 1);
    memory.fill(600, 1);
    freeze(&path, &mut memory, ImageKind::Sparse, None, description(), b"");
    let container = path.join("snapshot.firn");
    let header = Header::read(&fs::File::open(&container).unwrap(), &container).unwrap();
    flip(&container, header.range(Section::Digests).end - 1, 1);
    let snapshot = Snapshot::open(&path).unwrap();
    snapshot.digests().check(0, &[1; 4096]).unwrap();
    let error = snapshot.digests().check(600, &[1; 4096]).unwrap_err();
    assert!(matches!(error, crate::DigestError::DamagedRecord { chunk: 1, .. }), "{error}");
    let problems = problems(&path);
    let section = Section::Digests;
    assert!(
        matches!(&problems[0], Problem::Part(OpenError::Damaged { section: found, .. }) if *found == section)
    );
    assert!(matches!(
        &problems[1],
        Problem::Digests(crate::DigestError::DamagedRecord { chunk: 1, .. })
    ));
}

#[test]
fn damaged_pages_are_reported_by_guest_address() {
    let (_dir, path) = destination();
    let region = |guest_addr, pages| crate::MemoryRegion { guest_addr, len: pages * PAGE_SIZE };
    let layout = crate::MemoryLayout::new(vec![region(0, 600), region(1 << 32, 600)]).unwrap();
    let mut memory = Memory::with_layout(layout);
    memory.fill(10, 1);
    memory.fill(11, 1);
    memory.fill(600, 1);
    freeze(&path, &mut memory, ImageKind::Sparse, None, description(), b"");
    let image = path.join("memory.img");
    // Two stored pages, one page that is zero in the zero map, and the first page of the second
    // region.
    for page in [10, 11, 13, 600] {
        flip(&image, page * 4096 + 77, 0x80);
    }
    let found = problems(&path);
    let [Problem::Pages { total, runs }] = &found[..] else { panic!("{found:?}") };
    let runs: Vec<_> = runs.iter().map(|run| (run.start, run.pages())).collect();
    assert_eq!((*total, runs), (4, vec![(0xa000, 2), (0xd000, 1), (1 << 32, 1)]));
    let text = verify(&path, &mut |_, _| ()).unwrap_err().to_string();
    assert!(text.contains("0xa000-0xbfff, 0xd000, 0x100000000"), "{text}");
    // A stored page that reads as zero is damaged too, so lost pages are detected.
    fs::write(&image, vec![0; 1200 * 4096]).unwrap();
    let found = problems(&path);
    assert!(matches!(&found[..], [Problem::Pages { total: 3, .. }]), "{found:?}");
    fs::File::create(&image).unwrap().set_len(1200 * 4096).unwrap();
    let found = problems(&path);
    assert!(matches!(&found[..], [Problem::Pages { total: 3, .. }]), "{found:?}");
}

#[test]
fn many_damaged_pages_are_counted() {
    let (_dir, path) = destination();
    let mut memory = Memory::zeroed(100);
    memory.bytes.fill(1);
    freeze(&path, &mut memory, ImageKind::Sparse, None, description(), b"");
    for page in (0..100).step_by(2) {
        flip(&path.join("memory.img"), page * 4096, 1);
    }
    let found = problems(&path);
    let [Problem::Pages { total: 50, runs }] = &found[..] else { panic!("{found:?}") };
    assert_eq!(runs.len(), 16);
    assert!(found[0].to_string().contains("and 34 more"), "{}", found[0]);
}

#[test]
fn all_problems_are_listed() {
    let (_dir, path) = destination();
    freeze_generation(&path, 3);
    let container = path.join("snapshot.firn");
    let header = Header::read(&fs::File::open(&container).unwrap(), &container).unwrap();
    flip(&container, header.range(Section::MachineState).start, 1);
    flip(&path.join("memory.img"), 15 * 4096, 1);
    flip(&path.join("overlay.img"), 0, 1);
    let found = problems(&path);
    assert!(
        matches!(
            &found[..],
            [
                Problem::Part(OpenError::Damaged { section: Section::MachineState, .. }),
                Problem::Pages { total: 1, .. },
                Problem::Overlay
            ]
        ),
        "{found:?}"
    );
    fs::remove_file(path.join("memory.img")).unwrap();
    fs::write(path.join("overlay.img"), b"short").unwrap();
    let found = problems(&path);
    assert!(
        matches!(
            &found[..],
            [
                Problem::Part(OpenError::Damaged { section: Section::MachineState, .. }),
                Problem::Part(OpenError::MissingFile { .. }),
                Problem::Part(OpenError::Truncated { section: None, .. }),
            ]
        ),
        "{found:?}"
    );
}

#[test]
fn a_path_that_is_not_a_snapshot_is_reported() {
    let (dir, path) = destination();
    assert!(matches!(open_error(&path), OpenError::NotFound { .. }));
    fs::write(&path, b"a file").unwrap();
    assert!(matches!(open_error(&path), OpenError::NotASnapshot { .. }));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(open_error(&path), OpenError::NotASnapshot { .. }));
    fs::write(path.join("snapshot.firn"), b"other bytes than the magic").unwrap();
    assert!(matches!(open_error(&path), OpenError::NotASnapshot { .. }));
    fs::write(path.join("snapshot.firn"), b"").unwrap();
    assert!(matches!(open_error(&path), OpenError::Truncated { actual: 0, .. }));
    fs::remove_dir_all(&path).unwrap();
    symlink(dir.path().join("nowhere"), &path).unwrap();
    assert!(matches!(open_error(&path), OpenError::NotFound { .. }));
}

#[test]
fn the_error_names_a_missing_file() {
    for name in ["snapshot.firn", "memory.img", "overlay.img"] {
        let (_dir, path) = destination();
        freeze_generation(&path, 1);
        fs::remove_file(path.join(name)).unwrap();
        let error = open_error(&path);
        assert!(
            matches!(&error, OpenError::MissingFile { path } if path.ends_with(name)),
            "{error}"
        );
        assert!(!passes(&path));
    }
}

#[test]
fn links_pipes_and_directories_in_place_of_files_are_refused() {
    for name in ["snapshot.firn", "memory.img", "overlay.img"] {
        let (dir, path) = destination();
        freeze_generation(&path, 1);
        let file = path.join(name);
        let elsewhere = dir.path().join("elsewhere");
        fs::rename(&file, &elsewhere).unwrap();
        symlink(&elsewhere, &file).unwrap();
        assert!(matches!(open_error(&path), OpenError::NotAFile { .. }), "{name}");
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        assert!(matches!(open_error(&path), OpenError::NotAFile { .. }), "{name}");
        fs::remove_dir(&file).unwrap();
        mknodat(CWD, &file, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(matches!(open_error(&path), OpenError::NotAFile { .. }), "{name}");
        assert!(!passes(&path));
    }
}

#[test]
fn files_of_two_snapshots_are_refused() {
    let (_dir, one) = destination();
    let (_other_dir, two) = destination();
    freeze_generation(&one, 1);
    freeze_generation(&two, 2);
    fs::copy(two.join("memory.img"), one.join("memory.img")).unwrap();
    assert!(!passes(&one));
    fs::copy(two.join("overlay.img"), one.join("overlay.img")).unwrap();
    assert!(matches!(open_error(&one), OpenError::TooLong { .. }));
    fs::copy(two.join("snapshot.firn"), one.join("snapshot.firn")).unwrap();
    assert!(passes(&one));
}

proptest! {
    #![proptest_config(Config::with_cases(300))]

    #[test]
    fn random_damage_of_image_or_overlay_is_found(
        offset in any::<u64>(),
        mask in 1_u8..,
        overlay in any::<bool>(),
    ) {
        let (_dir, path) = destination();
        freeze_generation(&path, 1);
        let file = path.join(if overlay { "overlay.img" } else { "memory.img" });
        flip(&file, offset % fs::metadata(&file).unwrap().len(), mask);
        prop_assert!(!passes(&path));
    }

    #[test]
    fn random_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600), keep in 0_usize..200) {
        let (_dir, path) = destination();
        freeze_generation(&path, 1);
        let container = path.join("snapshot.firn");
        let good = fs::read(&container).unwrap();
        let keep = keep.min(good.len());
        let bad = [&good[..keep], &bytes[..]].concat();
        fs::write(&container, &bad).unwrap();
        prop_assert!(bad == good || !passes(&path));
    }
}
