//! Files with correct CRCs and invalid content. Each is refused. None causes a panic or an
//! allocation larger than the file.

use std::fs;
use std::path::Path;

use proptest::prelude::{any, prop_assert, proptest};
use proptest::test_runner::Config;

use super::support::{destination, freeze_generation};
use crate::container::{Entry, HOST_ARCHITECTURE, Header};
use crate::decode::decode_manifest;
use crate::section::Section;
use crate::{CONTAINER_VERSION, ImageKind, Manifest, OpenError, PROFILE_VERSION, Snapshot, verify};

/// The sections of a container, which can be changed and written with correct CRCs.
struct Sections {
    version: u32,
    architecture: u32,
    sections: Vec<(Section, u32, Vec<u8>)>,
}

impl Sections {
    fn read(path: &Path) -> Self {
        let path = path.join("snapshot.firn");
        let file = fs::File::open(&path).unwrap();
        let header = Header::read(&file, &path).unwrap();
        let sections = header.entries.iter().map(|entry| {
            let bytes = header.read_section(&file, &path, entry.section).unwrap();
            (entry.section, entry.version, bytes)
        });
        let (version, architecture) = (header.version, header.architecture);
        Self { version, architecture, sections: sections.collect() }
    }

    fn get(&mut self, section: Section) -> &mut (Section, u32, Vec<u8>) {
        self.sections.iter_mut().find(|(other, ..)| *other == section).unwrap()
    }

    fn edit_manifest(&mut self, edit: impl FnOnce(&mut Manifest)) {
        let (_, version, bytes) = self.get(Section::Manifest);
        let mut manifest = decode_manifest(bytes.clone(), *version, Path::new("m")).unwrap();
        edit(&mut manifest);
        *bytes = manifest.encode().unwrap().1;
    }

    fn encode(&self) -> Vec<u8> {
        let mut entries = Section::TABLE.map(|section| Entry::of(section, 0, &[]));
        for (entry, (section, version, bytes)) in entries.iter_mut().zip(&self.sections) {
            *entry = Entry::of(*section, *version, bytes);
        }
        let mut file =
            Header { version: self.version, architecture: self.architecture, entries }.encode();
        file.extend(self.sections.iter().flat_map(|(.., bytes)| bytes));
        file
    }

    fn write(&self, path: &Path) {
        fs::write(path.join("snapshot.firn"), self.encode()).unwrap();
    }
}

/// Freezes a small snapshot, lets `edit` change its sections, and opens it.
fn open_edited(edit: impl FnOnce(&mut Sections)) -> OpenError {
    let (_dir, path) = destination();
    freeze_generation(&path, 1);
    let mut sections = Sections::read(&path);
    sections.write(&path);
    Snapshot::open(&path).unwrap();
    edit(&mut sections);
    sections.write(&path);
    verify(&path, &mut |_, _| ()).unwrap_err();
    Snapshot::open(&path).unwrap_err()
}

/// Rewrites bytes of the header and its CRC, and opens the snapshot.
fn open_with_header(edit: impl FnOnce(&mut Vec<u8>)) -> OpenError {
    let (_dir, path) = destination();
    freeze_generation(&path, 1);
    let container = path.join("snapshot.firn");
    let mut bytes = fs::read(&container).unwrap();
    edit(&mut bytes);
    let end = usize::try_from(u32::from_le_bytes(bytes[20..24].try_into().unwrap())).unwrap() - 4;
    let crc = crc32fast::hash(&bytes[..end]);
    bytes[end..end + 4].copy_from_slice(&crc.to_le_bytes());
    fs::write(&container, &bytes).unwrap();
    verify(&path, &mut |_, _| ()).unwrap_err();
    Snapshot::open(&path).unwrap_err()
}

fn malformed(error: OpenError) -> Section {
    match error {
        OpenError::Malformed { section, .. } => section,
        error => panic!("{error}"),
    }
}

#[test]
fn unsupported_versions_are_reported() {
    let error = open_with_header(|bytes| bytes[16] = 3);
    assert!(matches!(
        error,
        OpenError::ContainerVersion { found: 3, supported: CONTAINER_VERSION, .. }
    ));
    let error = open_edited(|sections| sections.get(Section::Profile).1 = 7);
    assert!(matches!(
        error,
        OpenError::ProfileVersion { found: 7, supported: PROFILE_VERSION, .. }
    ));
    for section in [Section::Manifest, Section::ZeroMap, Section::Digests] {
        let error = open_edited(|sections| sections.get(section).1 = 7);
        assert_eq!(malformed(error), Section::Header);
    }
}

#[test]
fn a_header_of_a_later_version_may_have_another_layout() {
    let error = open_with_header(|bytes| {
        bytes[16] = 9;
        bytes[20..24].copy_from_slice(&40_u32.to_le_bytes());
    });
    assert!(matches!(error, OpenError::ContainerVersion { found: 9, .. }), "{error}");
}

#[test]
fn another_architecture_is_reported() {
    for architecture in [HOST_ARCHITECTURE + 1, 183, 0, u32::MAX] {
        let error = open_edited(|sections| sections.architecture = architecture);
        assert!(matches!(error, OpenError::Architecture { found, .. } if found == architecture));
    }
}

#[test]
fn a_header_that_contradicts_the_version_is_refused() {
    assert_eq!(malformed(open_with_header(|bytes| bytes[28] = 4)), Section::Header);
    assert_eq!(malformed(open_with_header(|bytes| bytes[32] = b'M')), Section::Header);
    let longer = open_with_header(|bytes| bytes[20..24].copy_from_slice(&200_u32.to_le_bytes()));
    assert_eq!(malformed(longer), Section::Header);
    let absurd = open_with_header(|bytes| bytes[32 + 16 + 7] = 0xff);
    assert!(matches!(absurd, OpenError::TooLarge { section: Section::Manifest, .. }), "{absurd}");
    for (index, section) in (0..).zip(Section::TABLE) {
        let len = section.max_len() + 1;
        let error = open_with_header(|bytes| {
            bytes[32 + index * 24 + 16..][..8].copy_from_slice(&len.to_le_bytes());
        });
        let OpenError::TooLarge { section: found, .. } = error else { panic!("{error}") };
        assert_eq!(found, section);
    }
    let no_profile = open_edited(|sections| sections.get(Section::Profile).2.push(0));
    assert!(matches!(no_profile, OpenError::TooLarge { section: Section::Profile, max: 0, .. }));
}

#[test]
fn a_profile_that_does_not_decode_is_refused_when_it_is_read() {
    let (_dir, path) = destination();
    freeze_generation(&path, 1);
    let mut sections = Sections::read(&path);
    *sections.get(Section::Profile) = (Section::Profile, PROFILE_VERSION, vec![0xff; 40]);
    sections.write(&path);
    let error = Snapshot::open(&path).unwrap().profile().unwrap_err();
    assert_eq!(malformed(error), Section::Profile);
}

#[test]
fn header_lengths_out_of_bounds_are_reported_as_damage() {
    let (_dir, path) = destination();
    freeze_generation(&path, 1);
    let container = path.join("snapshot.firn");
    let good = fs::read(&container).unwrap();
    for len in [0_u32, 1, 27, 4097, u32::MAX] {
        let mut bytes = good.clone();
        bytes[20..24].copy_from_slice(&len.to_le_bytes());
        fs::write(&container, &bytes).unwrap();
        let error = Snapshot::open(&path).unwrap_err();
        assert!(matches!(error, OpenError::Damaged { section: Section::Header, .. }), "{error}");
    }
}

#[test]
fn sections_that_contradict_each_other_are_refused() {
    let error = open_edited(|s| s.edit_manifest(|m| m.image.stored_pages += 1));
    assert_eq!(malformed(error), Section::Manifest);
    let error = open_edited(|s| s.edit_manifest(|m| m.image.kind = ImageKind::Dense));
    assert_eq!(malformed(error), Section::Manifest);
    let error = open_edited(|s| s.get(Section::ZeroMap).2[0] ^= 1);
    assert_eq!(malformed(error), Section::Manifest);
    let error = open_edited(|s| s.get(Section::ZeroMap).2.push(0));
    assert_eq!(malformed(error), Section::ZeroMap);
    let error = open_edited(|s| s.get(Section::Digests).2.truncate(131));
    assert_eq!(malformed(error), Section::Digests);
    let error = open_edited(|s| s.get(Section::Manifest).2.push(0));
    assert_eq!(malformed(error), Section::Manifest);
    let error = open_edited(|s| s.edit_manifest(|m| m.overlay.as_mut().unwrap().len = u64::MAX));
    assert!(matches!(error, OpenError::Truncated { expected: u64::MAX, .. }), "{error}");
}

#[test]
fn exchanged_records_of_digests_are_found() {
    let (_dir, path) = destination();
    let mut memory = super::support::Memory::zeroed(1024);
    memory.bytes.fill(1);
    let description = super::support::description();
    super::support::freeze(&path, &mut memory, ImageKind::Sparse, None, description, b"");
    let mut sections = Sections::read(&path);
    let digests = &mut sections.get(Section::Digests).2;
    digests.rotate_left(4100);
    sections.write(&path);
    let text = verify(&path, &mut |_, _| ()).unwrap_err().to_string();
    assert!(text.contains("chunk 0 are damaged") && text.contains("chunk 1 are damaged"), "{text}");
}

proptest! {
    #![proptest_config(Config::with_cases(500))]

    /// Changed bytes of the manifest with a correct CRC: a manifest that decodes is checked against
    /// the other sections.
    #[test]
    fn random_manifests_never_panic(
        edits in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..5),
        cut in proptest::option::of(any::<usize>()),
    ) {
        let (_dir, path) = destination();
        freeze_generation(&path, 1);
        let mut sections = Sections::read(&path);
        let manifest = &mut sections.get(Section::Manifest).2;
        for (at, byte) in edits {
            let at = at % manifest.len();
            manifest[at] = byte;
        }
        if let Some(cut) = cut {
            manifest.truncate(cut % (manifest.len() + 1));
        }
        sections.write(&path);
        let opens = Snapshot::open(&path).is_ok();
        let verifies = verify(&path, &mut |_, _| ()).is_ok();
        prop_assert!(opens || !verifies);
    }

    #[test]
    fn random_sections_never_panic(
        manifest in proptest::collection::vec(any::<u8>(), 0..200),
        keep_manifest in any::<bool>(),
        zero_map in proptest::collection::vec(any::<u8>(), 0..4),
        digests in proptest::collection::vec(any::<u8>(), 0..200),
        versions in any::<[u8; 5]>(),
    ) {
        let (_dir, path) = destination();
        freeze_generation(&path, 1);
        let mut sections = Sections::read(&path);
        if !keep_manifest {
            sections.get(Section::Manifest).2 = manifest;
        }
        sections.get(Section::ZeroMap).2 = zero_map;
        sections.get(Section::Digests).2 = digests;
        for ((_, version, _), random) in sections.sections.iter_mut().zip(versions) {
            *version = u32::from(random % 3);
        }
        sections.write(&path);
        prop_assert!(verify(&path, &mut |_, _| ()).is_err());
        let _ = Snapshot::open(&path);
    }
}
