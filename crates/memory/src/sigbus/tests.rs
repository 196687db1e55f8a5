use std::env;
use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::process::Command;

use firn_snapshot::{MemoryLayout, PageSet};
use vm_memory::{Bytes, GuestAddress};

use crate::planners::{ImageFacts, PlanInput, parse};
use crate::{GuestMemory, HostFacts, Sources, execute, sigbus};

const SIZE: u64 = 8 << 20;
const NAME: &str = "sigbus::tests::a_lost_page_ends_the_process_with_a_report";
const IMAGE: &str = "FIRN_TEST_IMAGE";

/// Guest memory mapped from an image.
fn memory(image: &File) -> GuestMemory {
    let layout = MemoryLayout::for_size(SIZE).unwrap();
    let zero_map = PageSet::new(layout.pages());
    let (host, facts) = (HostFacts::read().unwrap(), ImageFacts::of(image).unwrap());
    let input = PlanInput {
        layout: &layout,
        image: facts,
        zero_map: &zero_map,
        host: &host,
        profile: None,
        snapshot: None,
        copies: None,
    };
    let plan = parse("firecracker").unwrap().plan(&input).unwrap();
    execute(&plan, &Sources::image(image)).unwrap().memory
}

fn image(path: &PathBuf) -> File {
    let mut options = OpenOptions::new();
    let image = options.read(true).write(true).create(true).truncate(false).open(path).unwrap();
    image.set_len(SIZE).unwrap();
    image
}

#[test]
fn lost_bytes_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.img");
    let image = image(&path);
    let memory = memory(&image);
    assert_eq!(memory.lost_backing(None), None);
    image.set_len(SIZE - 0x3000).unwrap();
    let lost = memory.lost_backing(None).unwrap();
    assert_eq!((&lost.file, lost.offset, lost.len), (&path, SIZE - 0x3000, Some(SIZE - 0x3000)));
    let lost = memory.lost_backing(Some(SIZE - 0x1000)).unwrap();
    assert_eq!((lost.offset, lost.len), (SIZE - 0x1000, Some(SIZE - 0x3000)));
    assert_eq!(memory.lost_backing(Some(0x1000)).unwrap().len, None);
    assert_eq!(memory.lost_backing(Some(SIZE)), None);
    let text = lost.to_string();
    assert!(text.contains("memory.img is lost: the file was truncated to 8376320 bytes"), "{text}");
}

#[test]
fn a_lost_page_ends_the_process_with_a_report() {
    if let Some(path) = env::var_os(IMAGE) {
        let image = image(&PathBuf::from(path));
        let memory = memory(&image);
        sigbus::install().unwrap();
        image.set_len(0x5000).unwrap();
        let view = memory.vm_memory();
        assert_eq!(view.read_obj::<u64>(GuestAddress(0x4ff8)).unwrap(), 0);
        let _ = view.read_obj::<u64>(GuestAddress(0x5000));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.img");
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture", "--test-threads=1"])
        .env(IMAGE, &path)
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    let expected = format!(", guest page 0x5, is lost: it is byte 0x5000 of {}.", path.display());
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn lost_bytes_of_a_file_that_is_not_known_are_found_by_mapping() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.img");
    let image = image(&path);
    let mut memory = memory(&image);
    memory.know_files(Vec::new());
    assert_eq!(memory.lost_backing(None), None);
    image.set_len(SIZE - 0x3000).unwrap();
    let lost = memory.lost_backing(None).unwrap();
    assert_eq!((&lost.file, lost.offset, lost.len), (&path, SIZE - 0x3000, None));
}
