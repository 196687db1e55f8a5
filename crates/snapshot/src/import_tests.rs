use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::*;
use crate::page_set::PageSet;
use crate::tests::support::{Managed, Memory, description};
use crate::{
    Begin, Freeze, FreezeError, OpenError, OpenTwice, Seal, Target, Verify, open_pooled, verify,
};

fn machine() -> Machine {
    let state = b"the machine state".to_vec();
    Machine { description: description(), state_version: 3, state, reported: Vec::new() }
}

/// Memory of more than a chunk, of which some pages are zero.
fn memory() -> Memory {
    let mut memory = Memory::zeroed(700);
    [1, 2, 511, 512, 699].into_iter().zip(1..).for_each(|(page, byte)| memory.fill(page, byte));
    memory
}

/// Writes a state file and a memory file, as `firn-firecracker` does.
fn save(dir: &Path, memory: &dyn PageSource, target: Target) -> Result<(), FreezeError> {
    let image = dir.join("memory");
    let image = File::options().write(true).create(true).truncate(false).open(image).unwrap();
    let container = File::create(dir.join("state")).unwrap();
    let mut contents = Contents::new(memory, machine());
    let begin = Begin { target, function: None };
    contents.write(begin, vec![image.into(), tempfile::tempfile().unwrap().into()])?;
    contents.seal(Seal::Container { protected: Vec::new() }, vec![container.into()])?;
    Ok(())
}

fn open(dir: &Path) -> Result<Snapshot, OpenError> {
    let (state, memory) = (dir.join("state"), dir.join("memory"));
    let twice = OpenTwice::open(&memory).unwrap();
    Snapshot::of_two_files(File::open(&state).unwrap(), &state, Some((twice, &memory)))
}

fn saved() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), &memory(), Target::Files { dense: false }).unwrap();
    let path = dir.path().to_owned();
    (dir, path)
}

#[test]
fn state_and_memory_files_are_a_snapshot() {
    let (_dir, path) = saved();
    let snapshot = open(&path).unwrap();
    assert_eq!(snapshot.machine_state(), (3, &b"the machine state"[..]));
    assert_eq!(snapshot.manifest().description, description());
    assert_eq!(snapshot.zero_map().count(), 695);
    assert_eq!(fs::read(path.join("memory")).unwrap(), memory().bytes);
}

#[test]
fn it_is_imported_into_a_directory_and_a_pool() {
    let (_dir, path) = saved();
    let snapshot = open(&path).unwrap();
    let out = path.join("out");
    import(&snapshot, Destination::Directory(out.clone()), None).unwrap();
    verify(&out, &mut |_, _| ()).unwrap();
    let imported = Snapshot::open(&out).unwrap();
    assert_eq!(imported.manifest().description, snapshot.manifest().description);
    assert_eq!(imported.machine_state(), snapshot.machine_state());
    assert_eq!(fs::read(out.join("memory.img")).unwrap(), memory().bytes);

    let pool = Managed::new(64 << 20);
    let name = description().id.to_string();
    let destination = Destination::Pool { socket: pool.socket(), name: name.clone() };
    import(&snapshot, destination, None).unwrap();
    let (pooled, _grant) = open_pooled(&pool.socket(), &name, Verify::Always).unwrap();
    assert_eq!(pooled.manifest().description, snapshot.manifest().description);
    let mut bytes = vec![0; memory().bytes.len()];
    pooled.image().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, memory().bytes);
}

#[test]
fn a_damaged_memory_file_is_not_imported() {
    let (_dir, path) = saved();
    let file = File::options().write(true).open(path.join("memory")).unwrap();
    file.write_all_at(&[9], 300 * 4096).unwrap();
    let out = path.join("out");
    let error = import(&open(&path).unwrap(), Destination::Directory(out.clone()), None);
    let error = firn_base::error_chain(&error.unwrap_err());
    assert!(error.contains("0x12c") || error.contains("300"), "{error}");
    assert!(!out.exists());
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let (_dir, path) = saved();
    let file = File::options().append(true).open(path.join("memory")).unwrap();
    (&file).write_all(&[0]).unwrap();
    assert!(open(&path).is_err());
    file.set_len(700 * 4096).unwrap();
    open(&path).unwrap();
    let state = fs::read(path.join("state")).unwrap();
    fs::write(path.join("state"), &state[..state.len() - 1]).unwrap();
    assert!(open(&path).is_err());
}

#[test]
fn an_image_that_another_process_has_cannot_be_read() {
    let (_dir, path) = saved();
    let state = path.join("state");
    let snapshot = Snapshot::of_two_files(File::open(&state).unwrap(), &state, None).unwrap();
    assert_eq!(snapshot.image().size().unwrap(), 700 * 4096);
    assert!(snapshot.image_file().is_none());
    let out = path.join("out");
    import(&snapshot, Destination::Directory(out.clone()), None).unwrap_err();
    assert!(!out.exists());
}

/// Memory of which these pages were written.
struct Written(Memory, PageSet);

impl PageSource for Written {
    fn layout(&self) -> &MemoryLayout {
        self.0.layout()
    }

    fn written(&self) -> Option<&PageSet> {
        Some(&self.1)
    }

    fn chunk<'a>(&'a self, image_offset: u64, buf: &'a mut [u8]) -> io::Result<Chunk<'a>> {
        self.0.chunk(image_offset, buf)
    }
}

#[test]
fn written_pages_are_put_into_the_file_that_is_there() {
    let (_dir, path) = saved();
    let mut later = memory();
    // A page becomes zero, one gets content, and one is written with what it had.
    later.fill(2, 0);
    later.fill(600, 7);
    let mut pages = PageSet::new(700);
    [2, 511, 600].into_iter().for_each(|page| pages.insert(page));
    let expected = later.bytes.clone();
    save(&path, &Written(later, pages.clone()), Target::Written).unwrap();
    assert_eq!(fs::read(path.join("memory")).unwrap(), expected);
    let snapshot = open(&path).unwrap();
    assert_eq!(snapshot.zero_map().count(), 695);
    import(&snapshot, Destination::Directory(path.join("out")), None).unwrap();

    // In an empty file there is nothing else.
    fs::remove_file(path.join("memory")).unwrap();
    let mut later = memory();
    later.fill(600, 7);
    save(&path, &Written(later, pages), Target::Written).unwrap();
    let bytes = fs::read(path.join("memory")).unwrap();
    assert_eq!(bytes.len(), 700 * 4096);
    let content: Vec<_> = (0..700).filter(|page| bytes[page * 4096] != 0).collect();
    assert_eq!(content, [2, 511, 600]);

    let error = save(&path, &memory(), Target::Written).unwrap_err();
    assert!(matches!(error, FreezeError::NotTracked));
}
