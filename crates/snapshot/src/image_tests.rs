use std::fs::OpenOptions;
use std::sync::atomic::{AtomicBool, AtomicU64};

use proptest::prelude::{any, prop_assert_eq, proptest};

use super::{is_zero, write_image};
use crate::freeze_error::FreezeError;
use crate::manifest::ImageKind;
use crate::sparse_file::SparseFile;
use crate::tests::support::Memory;

/// A file on a full medium.
fn full() -> SparseFile {
    let file = OpenOptions::new().write(true).open("/dev/full").unwrap();
    SparseFile {
        file,
        path: "memory.img".into(),
        needed: AtomicU64::new(0),
        full: AtomicBool::new(false),
    }
}

#[test]
fn a_full_file_system_reports_the_total_size() {
    for (kind, expected) in [(ImageKind::Sparse, 3 * 4096), (ImageKind::Dense, 2000 * 4096)] {
        let mut memory = Memory::zeroed(2000);
        for page in [0, 700, 1999] {
            memory.fill(page, 1);
        }
        let out = full();
        write_image(&out, &memory, kind).unwrap();
        let error = out.finish().unwrap_err();
        let FreezeError::NoSpace { needed, .. } = error else { panic!("{error}") };
        assert_eq!(needed, expected);
    }
}

#[test]
fn all_zero_memory_needs_no_space() {
    let out = full();
    let image = write_image(&out, &Memory::zeroed(2000), ImageKind::Sparse).unwrap();
    assert_eq!((image.zero_map.count(), out.finish().unwrap()), (2000, 0));
}

proptest! {
    #[test]
    fn a_zero_page_differs_from_any_other(len in 0_usize..300, spot in any::<usize>(), byte in any::<u8>()) {
        let mut bytes = vec![0; len];
        if len > 0 {
            bytes[spot % len] = byte;
        }
        prop_assert_eq!(is_zero(&bytes), len == 0 || byte == 0);
    }
}
