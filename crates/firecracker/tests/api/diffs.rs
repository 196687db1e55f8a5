//! Diff snapshots: only what was written, and with what was saved before all of memory.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use serde_json::{Value, json};

use crate::player::{Player, has_kvm, replay};
use crate::process::Process;

fn create(dir: &Path, kind: &str, name: &str) -> Value {
    let path = |end: &str| dir.join(format!("{name}.{end}"));
    json!({ "snapshot_type": kind, "snapshot_path": path("state"), "mem_file_path": path("memory") })
}

fn load(create: &Value, tracks: bool) -> Value {
    let backend = json!({ "backend_type": "File", "backend_path": create["mem_file_path"] });
    json!({ "snapshot_path": create["snapshot_path"], "mem_backend": backend, "track_dirty_pages": tracks })
}

fn path(create: &Value) -> &Path {
    Path::new(create["mem_file_path"].as_str().unwrap())
}

/// Copies the data of a sparse file over another one, as Firecracker's tool does.
fn merge(base: &Path, diff: &Path) {
    let (base, diff) = (File::options().write(true).open(base).unwrap(), File::open(diff).unwrap());
    let len = diff.metadata().unwrap().len();
    let mut at = 0;
    while let Ok(start) = rustix::fs::seek(&diff, rustix::fs::SeekFrom::Data(at)) {
        at = rustix::fs::seek(&diff, rustix::fs::SeekFrom::Hole(start)).unwrap();
        let mut bytes = vec![0; usize::try_from(at - start).unwrap()];
        diff.read_exact_at(&mut bytes, start).unwrap();
        base.write_all_at(&bytes, start).unwrap();
        if at == len {
            break;
        }
    }
}

#[test]
fn diff_snapshots_merge_into_a_full_one() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let mut process = Process::start();
    player.configure(&process, true);
    process.start_instance();
    assert_eq!(process.line(), "READY");
    process.pause();
    let base = create(dir.path(), "Full", "base");
    process.put("/snapshot/create", &base);
    let same = create(dir.path(), "Diff", "same");
    process.put("/snapshot/create", &same);
    let blocks = |create: &Value| fs::metadata(path(create)).unwrap().blocks();
    assert_eq!(blocks(&same), 0, "nothing was written since");
    process.resume();
    replay(&mut process);
    process.pause();
    let diff = create(dir.path(), "Diff", "diff");
    process.put("/snapshot/create", &diff);
    let full = create(dir.path(), "Full", "full");
    process.put("/snapshot/create", &full);
    assert!(blocks(&diff) > 0 && blocks(&diff) < blocks(&full), "{}", blocks(&diff));
    merge(path(&base), path(&diff));
    assert_eq!(fs::read(path(&base)).unwrap(), fs::read(path(&full)).unwrap());
}

#[test]
fn a_loaded_microvm_makes_a_diff_of_what_it_wrote_itself() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let process = Process::start();
    player.boot(&process);
    process.pause();
    let base = create(dir.path(), "Full", "base");
    process.put("/snapshot/create", &base);
    // What it wrote is not known, so all of it counts as written.
    let all = create(dir.path(), "Diff", "all");
    process.put("/snapshot/create", &all);
    let data = fs::metadata(path(&all)).unwrap();
    assert_eq!(data.blocks() * 512, data.len());
    assert_eq!(fs::read(path(&all)).unwrap(), fs::read(path(&base)).unwrap());
    let mut process = Process::start();
    process.put("/snapshot/load", &load(&base, true));
    assert_eq!(process.get("/machine-config")["track_dirty_pages"], true);
    process.resume();
    replay(&mut process);
    process.pause();
    let diff = create(dir.path(), "Diff", "diff");
    process.put("/snapshot/create", &diff);
    let full = create(dir.path(), "Full", "full");
    process.put("/snapshot/create", &full);
    // Over a copy: this process has mapped the base.
    let copy = dir.path().join("copy");
    fs::copy(path(&base), &copy).unwrap();
    merge(&copy, path(&diff));
    assert_eq!(fs::read(&copy).unwrap(), fs::read(path(&full)).unwrap());
    // The state file of a diff is that of the whole memory.
    let mut merged = load(&diff, false);
    merged["mem_backend"]["backend_path"] = json!(copy);
    let loaded = Process::start();
    loaded.put("/snapshot/load", &merged);
    loaded.resume();
    assert_eq!(loaded.get("/")["state"], "Running");
}
