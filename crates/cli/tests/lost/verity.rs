//! Snapshots on an ext4 with fs-verity, which `firn lab run --fsdax` provides. On other hosts the
//! tests pass without a check.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::ioctl::{Updater, ioctl};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::Value;
use tempfile::TempDir;

use super::{done, ended, firn, has_kvm, start, text};

const DEVICE: &str = "/dev/pmem1";
/// `FIBMAP` (linux/fs.h).
const FIBMAP: u32 = 1;
const BLOCK: u64 = 4096;

/// The file system, mounted without DAX until this is dropped.
struct Mounted(TempDir);

impl Mounted {
    fn new() -> Self {
        let mounted = Self(TempDir::new().unwrap());
        mounted.mount();
        mounted
    }

    fn mount(&self) {
        mount(DEVICE, self.0.path(), "ext4", MountFlags::NOATIME, c"dax=never").unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Flips a bit of a file's byte on the medium, behind the file system. No page of it is cached
    /// afterwards.
    fn damage(&self, file: &Path, offset: u64) {
        let mut block = i32::try_from(offset / BLOCK).unwrap();
        let opened = File::open(file).unwrap();
        // SAFETY: FIBMAP takes an int, the number of a file's block, and replaces it.
        let find = unsafe { Updater::<FIBMAP, i32>::new(&mut block) };
        // SAFETY: as above.
        unsafe { ioctl(&opened, find) }.unwrap();
        assert_ne!(block, 0, "a hole");
        drop(opened);
        unmount(self.0.path(), UnmountFlags::empty()).unwrap();
        let medium = OpenOptions::new().read(true).write(true).open(DEVICE).unwrap();
        let offset = u64::try_from(block).unwrap() * BLOCK + offset % BLOCK;
        let mut byte = [0];
        medium.read_exact_at(&mut byte, offset).unwrap();
        medium.write_all_at(&[byte[0] ^ 1], offset).unwrap();
        medium.sync_all().unwrap();
        drop(medium);
        self.mount();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&done(arguments)).unwrap()
}

fn refused(arguments: &[&str]) -> String {
    let output = firn(arguments).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
    error
}

/// The integrity of the bytes that a plan maps from files.
fn integrity(planner: &str, snapshot: &Path) -> Vec<String> {
    let plan = json(&["plan", "--json", "--planner", planner, text(snapshot)]);
    let segments = plan["plans"][0]["segments"].as_array().unwrap();
    let of_file = |segment: &&Value| {
        ["image", "packed"].iter().any(|kind| segment["source"]["kind"] == *kind)
    };
    let mut found: Vec<_> = segments
        .iter()
        .filter(of_file)
        .map(|segment| segment["integrity"].as_str().unwrap().to_owned())
        .collect();
    found.dedup();
    found
}

/// A thaw ends because of a damaged page of a file, and the player has read no wrong byte. The
/// loader calls the loading-set file the packed file.
fn fails_on(names: &[&str], planner: &str, snapshot: &Path) {
    let error = refused(&["thaw", "--planner", planner, text(snapshot)]);
    let named = names.iter().any(|name| error.contains(name)) && error.contains("fs-verity found");
    assert!(named && !error.contains("wrong memory"), "{error}");
}

#[test]
fn fs_verity_protects_what_the_kernel_pages_in() {
    if !firn_required::has("dax", Path::new(DEVICE).exists()) || !has_kvm() {
        return;
    }
    let mounted = Mounted::new();
    let snapshot = mounted.file("player");
    let (image, set) = (snapshot.join("memory.img"), snapshot.join("loading-set.img"));
    let player = ["player", "--dense", "--json", "--trace", "sequential-read:4M", "--out"];
    let frozen = json(&[&player[..], &[text(&snapshot)]].concat());
    assert_eq!(frozen["freeze"]["protected"], serde_json::json!(["memory.img"]), "{frozen}");
    assert!(OpenOptions::new().write(true).open(&image).is_err());

    done(&["profile", "record", "--part", "groups,cache", text(&snapshot)]);
    done(&["profile", "pack", "--planner", "faasnap", text(&snapshot)]);
    // A file is replaced, not written.
    done(&["profile", "pack", "--planner", "faasnap:merge=0", text(&snapshot)]);
    let verified = json(&["verify", "--json", text(&snapshot)]);
    let both = serde_json::json!(["memory.img", "loading-set.img"]);
    assert_eq!(verified["report"]["protected"], both, "{verified}");
    for planner in ["firecracker", "faasnap:merge=0", "snapbpf"] {
        assert_eq!(integrity(planner, &snapshot), ["checked_by_kernel"]);
        done(&["thaw", "--planner", planner, text(&snapshot)]);
    }

    // The file of a copy is not the one that was sealed, until the snapshot is checked.
    let copy = mounted.file("copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(&snapshot).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    for command in [&["thaw"][..], &["verify"]] {
        let error = refused(&[command, &[text(&copy)]].concat());
        assert!(error.contains("fs-verity does not protect it"), "{error}");
        assert!(error.contains("firn verify --protect"), "{error}");
    }
    let protected = json(&["verify", "--json", "--protect", text(&copy)]);
    assert_eq!(protected["report"]["protected"], both, "{protected}");
    done(&["thaw", text(&copy)]);

    // A file with the protection of another content.
    let other = mounted.file("other");
    done(&["player", "--dense", "--trace", "sequential-write:4M", "--out", text(&other)]);
    fs::rename(other.join("memory.img"), copy.join("memory.img")).unwrap();
    let error = refused(&["thaw", text(&copy)]);
    assert!(error.contains("its fs-verity digest differs"), "{error}");

    let middle = |file: &Path| fs::metadata(file).unwrap().len() / 2;
    mounted.damage(&set, middle(&set));
    fails_on(&[text(&set), "packed file"], "faasnap:merge=0", &snapshot);
    done(&["thaw", "--planner", "firecracker", text(&snapshot)]);
    mounted.damage(&image, middle(&image));
    for planner in ["firecracker", "snapbpf"] {
        fails_on(&[text(&image)], planner, &snapshot);
    }
    let error = refused(&["verify", text(&snapshot)]);
    assert!(error.contains("memory.img") && error.contains("loading-set.img"), "{error}");
}

/// Writes a file to its disk before the freeze, and reads it from there, not from its page cache.
const READER: &str = "\
import os

KEPT = b'kept on the disk' * 1024

with open('/tmp/kept', 'wb') as file:
    file.write(KEPT)
    file.flush()
    os.fsync(file.fileno())


def handler(event, context):
    with open('/tmp/kept', 'rb', buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            return file.read(len(KEPT)) == KEPT
        except OSError as error:
            return error.strerror
";

#[test]
fn fs_verity_protects_the_disk_of_a_guest() {
    if !firn_required::has("dax", Path::new(DEVICE).exists()) || !has_kvm() {
        return;
    }
    let (mounted, folder) = (Mounted::new(), TempDir::new().unwrap());
    let function = folder.path().join("reader");
    fs::create_dir(&function).unwrap();
    fs::write(function.join("handler.py"), READER).unwrap();
    let snapshot = mounted.file("linux");
    let monitor = start(&["boot", "--name", "verity", text(&function)]);
    assert_eq!(done(&["invoke", "verity", "{}"]).trim(), "true");
    let frozen = json(&["freeze", "--json", "verity", text(&snapshot)]);
    let (error, status) = ended(monitor);
    assert!(status.success(), "{error}");
    let both = serde_json::json!(["memory.img", "overlay.img"]);
    assert_eq!(frozen["protected"], both, "{frozen}");
    let thawed = || done(&["thaw", "--invoke", "{}", text(&snapshot)]);
    assert_eq!(thawed().trim(), "true");

    let overlay = snapshot.join("overlay.img");
    let (file, mut start) = (File::open(&overlay).unwrap(), [0; 16]);
    let kept = (0..).map(|block| block * BLOCK).find(|offset| {
        file.read_exact_at(&mut start, *offset).unwrap();
        start == *b"kept on the disk"
    });
    drop(file);
    mounted.damage(&overlay, kept.unwrap());
    assert_eq!(thawed().trim(), "\"Input/output error\"");
    let error = refused(&["verify", text(&snapshot)]);
    assert!(error.contains("overlay.img"), "{error}");
}
