use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{Lab, copy_sparse, pmem};
use crate::{LabError, RunConfig, devdax};

fn config(pmem: Option<&Path>, pmem_size_mib: u64) -> RunConfig {
    RunConfig {
        pmem: pmem.map(Path::to_owned),
        pmem_size_mib,
        ..RunConfig::new(vec!["true".to_owned()])
    }
}

fn lab(cache: &tempfile::TempDir) -> Lab {
    for part in ["qemu", "l1"] {
        fs::create_dir_all(cache.path().join("lab").join(part)).unwrap();
    }
    for disk in ["scratch.ext4", "guest.ext4"] {
        fs::write(cache.path().join("lab").join(disk), "").unwrap();
    }
    Lab::open(cache.path().to_owned()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_missing_lab_is_an_error_with_the_remedy() {
    let cache = tempfile::tempdir().unwrap();
    let error = Lab::open(cache.path().to_owned()).err().unwrap();
    assert!(matches!(error, LabError::NotBuilt { .. }));
    assert!(error.to_string().contains("firn lab build"), "{error}");
}

#[test]
fn a_copy_is_equal_and_keeps_the_holes() {
    let mut from = tempfile::tempfile().unwrap();
    let mut to = tempfile::tempfile().unwrap();
    from.set_len(32 << 20).unwrap();
    for (offset, text) in [(0, "start"), (5 << 20, "middle"), (20 << 20, "late")] {
        from.seek(SeekFrom::Start(offset)).unwrap();
        from.write_all(text.as_bytes()).unwrap();
    }
    copy_sparse(&mut from, &mut to, 0).unwrap();
    let [mut original, mut copy] = [Vec::new(), Vec::new()];
    for (file, content) in [(&mut from, &mut original), (&mut to, &mut copy)] {
        file.rewind().unwrap();
        file.read_to_end(content).unwrap();
    }
    assert!(original == copy);
    assert!(
        to.metadata().unwrap().blocks() * 512 < 1 << 20,
        "the copy uses no more space than the written data"
    );
}

#[test]
fn persistent_memory_without_a_name_is_formatted_and_leaves_no_file() {
    let cache = tempfile::tempdir().unwrap();
    let lab = lab(&cache);
    let (file, size) = pmem(&lab, &config(None, 65)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(size, 68 << 20, "65 MiB in units of 2 MiB, and 2 MiB for the block");
    assert!(devdax::is_formatted(&file).unwrap());
    assert!(
        file.metadata().unwrap().blocks() * 512 >= size,
        "the space is reserved before QEMU starts"
    );
    assert_eq!(fs::read_dir(cache.path().join("lab")).unwrap().count(), 4);
}

#[test]
fn persistent_memory_with_a_name_is_created_once_and_kept() {
    let cache = tempfile::tempdir().unwrap();
    let lab = lab(&cache);
    let path = cache.path().join("pmem");
    let (mut file, size) =
        pmem(&lab, &config(Some(&path), 64)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(size, 66 << 20);
    file.seek(SeekFrom::Start(4 << 20)).unwrap();
    file.write_all(b"kept").unwrap();

    let (mut file, size) =
        pmem(&lab, &config(Some(&path), 128)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(size, 66 << 20, "an existing file keeps its size");
    let mut content = [0; 4];
    file.seek(SeekFrom::Start(4 << 20)).unwrap();
    file.read_exact(&mut content).unwrap();
    assert_eq!(&content, b"kept");
}

#[test]
fn a_foreign_file_is_not_changed() {
    let cache = tempfile::tempdir().unwrap();
    let lab = lab(&cache);
    let path = cache.path().join("precious");
    fs::write(&path, vec![7; 8192]).unwrap();
    let error = pmem(&lab, &config(Some(&path), RunConfig::PMEM_MIB)).unwrap_err();
    assert!(matches!(error, LabError::PmemForeign { .. }), "{error}");
    assert_eq!(fs::read(&path).unwrap(), vec![7; 8192]);

    let odd = cache.path().join("odd");
    devdax::format(
        &File::create_new(&odd).unwrap(),
        (64 << 20) + 4096,
        [1; 16],
        devdax::Mode::Devdax,
    )
    .unwrap();
    let error = pmem(&lab, &config(Some(&odd), RunConfig::PMEM_MIB)).unwrap_err();
    assert!(matches!(error, LabError::PmemSize { size: 67_112_960, .. }), "{error}");
}
