//! Snapshots: created in one process, loaded in another.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::player::{Player, has_kvm, replay};
use crate::process::Process;

/// The files of a snapshot of a player that is ready.
struct Saved {
    state: PathBuf,
    memory: PathBuf,
    mib: u64,
}

impl Saved {
    fn new(dir: &Path) -> Self {
        let player = Player::new(dir);
        let process = Process::start();
        player.boot(&process);
        process.pause();
        let saved =
            Self { state: dir.join("state"), memory: dir.join("memory"), mib: player.memory };
        process.put("/snapshot/create", &saved.body());
        saved
    }

    /// The body of its creation.
    fn body(&self) -> Value {
        json!({ "snapshot_type": "Full", "snapshot_path": self.state, "mem_file_path": self.memory })
    }

    /// The body of a load, with more fields.
    fn load(&self, more: &Value) -> Value {
        let backend = json!({ "backend_type": "File", "backend_path": self.memory });
        let mut body = json!({ "snapshot_path": self.state, "mem_backend": backend });
        let fields = body.as_object_mut().unwrap();
        for (name, value) in more.as_object().unwrap() {
            fields.insert(name.clone(), value.clone());
        }
        body
    }
}

#[test]
fn a_snapshot_is_loaded_in_a_new_process() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let saved = Saved::new(dir.path());
    assert_eq!(fs::metadata(&saved.memory).unwrap().len(), saved.mib << 20);
    let mut process = Process::start();
    process.put("/snapshot/load", &saved.load(&json!({})));
    assert_eq!(process.get("/")["state"], "Paused");
    assert_eq!(process.get("/machine-config")["mem_size_mib"], saved.mib);
    assert!(process.get("/vm/config").get("boot-source").is_none());
    process.resume();
    replay(&mut process);
    // The memory file is mapped privately.
    let mut second = Process::start();
    second.put("/snapshot/load", &saved.load(&json!({ "resume_vm": true })));
    assert_eq!(second.get("/")["state"], "Running");
    replay(&mut second);
    // As older clients name the file.
    let mut third = Process::start();
    let body =
        json!({ "snapshot_path": saved.state, "mem_file_path": saved.memory, "resume_vm": true });
    third.put("/snapshot/load", &body);
    replay(&mut third);
}

#[test]
fn a_loaded_microvm_is_saved_and_loaded_again() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let saved = Saved::new(dir.path());
    let process = Process::start();
    process.put("/snapshot/load", &saved.load(&json!({})));
    let error = process.refused("PUT", "/snapshot/create", &saved.body());
    assert!(error.contains("is the file that this microVM's memory is mapped from"), "{error}");
    let other =
        Saved { state: dir.path().join("state2"), memory: dir.path().join("memory2"), ..saved };
    process.put("/snapshot/create", &other.body());
    drop(process);
    let mut process = Process::start();
    process.put("/snapshot/load", &other.load(&json!({ "resume_vm": true })));
    replay(&mut process);
}

#[test]
fn a_snapshot_of_a_running_microvm_is_refused() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let process = Process::start();
    player.boot(&process);
    let files =
        json!({ "snapshot_path": dir.path().join("s"), "mem_file_path": dir.path().join("m") });
    let error = process.refused("PUT", "/snapshot/create", &files);
    assert_eq!(error, "the microVM runs: pause it before a snapshot is created");
    process.pause();
    let mut body = files.clone();
    body["snapshot_path"] = json!("/nonesuch/state");
    let error = process.refused("PUT", "/snapshot/create", &body);
    assert!(
        error.starts_with("snapshot_path is not valid: cannot open /nonesuch/state"),
        "{error}"
    );
    process.put("/snapshot/create", &files);
}

#[test]
fn files_that_are_no_snapshot_are_refused_and_the_process_goes_on() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let saved = Saved::new(dir.path());
    let state = fs::read(&saved.state).unwrap();
    let mut process = Process::start();
    let damage = |at: usize, text: &str| {
        let mut bytes = state.clone();
        bytes[at] ^= 1;
        fs::write(&saved.state, bytes).unwrap();
        let error = process.refused("PUT", "/snapshot/load", &saved.load(&json!({})));
        assert!(error.contains(text), "{at}: {error}");
    };
    damage(0, "is not a snapshot");
    damage(20, "damaged");
    damage(300, "damaged");
    fs::write(&saved.state, &state[..20]).unwrap();
    let error = process.refused("PUT", "/snapshot/load", &saved.load(&json!({})));
    assert!(error.contains("truncated") || error.contains("bytes"), "{error}");
    fs::write(&saved.state, &state).unwrap();
    let short = fs::File::options().write(true).open(&saved.memory).unwrap();
    short.set_len((saved.mib << 20) - 4096).unwrap();
    let error = process.refused("PUT", "/snapshot/load", &saved.load(&json!({})));
    assert!(error.contains("memory"), "{error}");
    short.set_len(saved.mib << 20).unwrap();
    process.put("/snapshot/load", &saved.load(&json!({ "resume_vm": true })));
    assert!(process.runs());
}

#[test]
fn a_memory_file_has_holes_for_zero_pages() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let saved = Saved::new(dir.path());
    let metadata = fs::metadata(&saved.memory).unwrap();
    assert!(metadata.blocks() * 512 < metadata.len(), "{} blocks", metadata.blocks());
}

#[test]
fn a_load_after_resources_is_refused() {
    let process = Process::start();
    let body = json!({ "snapshot_path": "/nonesuch", "mem_file_path": "/nonesuch" });
    // Logger and planner are no resources.
    process.put("/logger", &json!({ "level": "Off" }));
    process.put("/firn/planner", &json!({ "planner": "firecracker:readahead=off" }));
    let error = process.refused("PUT", "/snapshot/load", &body);
    assert!(error.starts_with("snapshot_path is not valid: cannot open /nonesuch"), "{error}");
    process.put("/machine-config", &json!({ "vcpu_count": 1, "mem_size_mib": 128 }));
    let error = process.refused("PUT", "/snapshot/load", &body);
    assert!(error.starts_with("a snapshot cannot be loaded: only logger"), "{error}");
}

#[test]
fn fields_of_a_load_that_contradict_each_other_are_refused() {
    let process = Process::start();
    let backend = json!({ "backend_type": "File", "backend_path": "/y" });
    let refused = |body: &Value| process.refused("PUT", "/snapshot/load", body);
    assert_eq!(
        refused(&json!({ "snapshot_path": "/x" })),
        "mem_backend is not valid: send it or mem_file_path"
    );
    let both = json!({ "snapshot_path": "/x", "mem_file_path": "/y", "mem_backend": backend });
    assert_eq!(refused(&both), "mem_backend is not valid: send it or mem_file_path, not both");
    let twice = json!({
        "snapshot_path": "/x", "mem_backend": backend,
        "track_dirty_pages": true, "enable_diff_snapshots": true,
    });
    assert!(refused(&twice).starts_with("enable_diff_snapshots is not valid"));
}

#[test]
fn a_planner_is_selected() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let saved = Saved::new(dir.path());
    let mut process = Process::start();
    let error = process.refused("PUT", "/firn/planner", &json!({ "planner": "none" }));
    assert!(error.starts_with("planner is not valid"), "{error}");
    process.put("/firn/planner", &json!({ "planner": "pass_shared" }));
    let error = process.refused("PUT", "/snapshot/load", &saved.load(&json!({})));
    assert_eq!(error, "the planner pass_shared needs a pool: PUT /firn/planner with one");
    process.put("/firn/planner", &json!({ "planner": "dram_cached" }));
    assert_eq!(process.get("/vm/config")["firn-planner"]["planner"], "dram_cached");
    process.put("/snapshot/load", &saved.load(&json!({ "resume_vm": true })));
    replay(&mut process);
}
