use std::fs::File;
use std::io;
use std::ops::Range;

use proptest::prelude::{any, prop_assert_eq, proptest};

use super::{DiskError, DiskInfo, DiskSource, scan};

/// A disk whose data lies in the given ranges, as a copy-on-write device merges base and upper
/// file.
struct Merged {
    bytes: Vec<u8>,
    data: Vec<Range<u64>>,
}

impl DiskSource for Merged {
    fn size(&mut self) -> io::Result<u64> {
        Ok(self.bytes.len() as u64)
    }

    fn next_data(&mut self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let next = self.data.iter().find(|range| range.end > offset);
        Ok(next.map(|range| range.start.max(offset)..range.end))
    }

    fn read(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap();
        buf.copy_from_slice(&self.bytes[start..start + buf.len()]);
        Ok(())
    }
}

fn identity(disk: &mut Merged) -> super::DiskIdentity {
    scan(disk, |_, _| Ok::<_, io::Error>(())).unwrap()
}

#[test]
fn a_source_with_descending_offsets_is_refused() {
    struct Backwards;
    impl DiskSource for Backwards {
        fn size(&mut self) -> io::Result<u64> {
            Ok(8192)
        }
        fn next_data(&mut self, offset: u64) -> io::Result<Option<Range<u64>>> {
            Ok(Some(if offset == 0 { 0..4096 } else { 0..8192 }))
        }
        fn read(&mut self, _: &mut [u8], _: u64) -> io::Result<()> {
            Ok(())
        }
    }
    assert!(scan(&mut Backwards, |_, _| Ok::<_, io::Error>(())).is_err());
}

#[test]
fn an_empty_disk_has_an_identity() {
    let empty = || Merged { bytes: vec![], data: vec![] };
    assert_eq!(identity(&mut empty()).len, 0);
    assert_eq!(identity(&mut empty()), identity(&mut empty()));
}

proptest! {
    /// The division of the data into ranges affects neither the written data nor the identity.
    #[test]
    fn ranges_do_not_matter(
        len in 1_u64..5_000_000,
        mut cuts in proptest::collection::vec(any::<u64>(), 0..8),
    ) {
        cuts.iter_mut().for_each(|cut| *cut %= len);
        cuts.sort_unstable();
        cuts.dedup();
        let data: Vec<_> = cuts.chunks_exact(2).map(|pair| pair[0]..pair[1]).collect();
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        for range in &data {
            for at in range.clone() {
                bytes[usize::try_from(at).unwrap()] = u8::try_from(at % 251).unwrap();
            }
        }
        let whole = 0..len;
        let mut plain = Merged { bytes: bytes.clone(), data: vec![whole] };
        let mut merged = Merged { bytes: bytes.clone(), data };
        let mut copy = vec![0; bytes.len()];
        let found = scan(&mut merged, |offset, block: &[u8]| {
            let start = usize::try_from(offset).unwrap();
            copy[start..start + block.len()].copy_from_slice(block);
            Ok::<_, io::Error>(())
        }).unwrap();
        prop_assert_eq!(found, identity(&mut plain));
        prop_assert_eq!(copy == bytes, true);
    }
}

#[test]
fn an_open_file_is_described_and_checked_like_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, [7; 4096]).unwrap();
    let file = File::open(&path).unwrap();
    let disk = DiskInfo::new("root", &path).unwrap();
    assert_eq!(DiskInfo::of_file("root", &disk.path, &file).unwrap(), disk);
    disk.check_file(&file).unwrap();
    std::fs::write(&path, [8; 4096]).unwrap();
    assert!(matches!(disk.check_file(&file), Err(DiskError::Changed { .. })));
    let directory = File::open(dir.path()).unwrap();
    assert!(matches!(disk.check_file(&directory), Err(DiskError::NotAFile { .. })));
}
