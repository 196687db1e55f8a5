//! `firn bench` as a process, with real players if the host has KVM.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use firn_base::{PAGE_SIZE, error_chain};
use firn_bench::player::{PlayerInputs, PlayerOptions, freeze};
use firn_bench::traces::{NamedTrace, load};
use firn_bench::{Cache, FrozenPlayer, Host, Interrupt, Jails, Quiet, Session, Subject};
use firn_memory::trace::Access;
use firn_snapshot::{Destination, PageSet};
use firn_vmm::{KVM_DEVICE, open_kvm};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use memory_pool::MemoryPool;

mod memory_pool;

const FIRN: &str = env!("CARGO_BIN_EXE_firn");

fn has_kvm() -> bool {
    firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok())
}

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(FIRN);
    command.arg("bench").args(arguments).stdin(Stdio::null());
    command
}

fn output(arguments: &[&str]) -> Output {
    bench(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// A directory whose files can be evicted from the page cache; `None` without one or without KVM.
fn directory_on_disk() -> Option<TempDir> {
    let directory = tempfile::tempdir().unwrap();
    let file = fs::File::open(directory.path()).unwrap();
    (has_kvm() && firn_required::is_on_disk(file)).then_some(directory)
}

fn files(directory: &Path) -> usize {
    fs::read_dir(directory).unwrap().count()
}

#[test]
fn another_program_has_its_turns_among_the_planners() {
    // Tests of the whole workspace build it.
    let program = Path::new(FIRN).with_file_name("firn-firecracker");
    if !has_kvm() || !program.exists() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let [program, json_path] = [&program, &json].map(|path| path.to_str().unwrap());
    let thaw = ["thaw", "--trace", "sequential-read:4M", "--planner", "firecracker", "--runs", "2"];
    let run = output(&[&thaw[..], &["--firecracker", program, "--json", json_path]].concat());
    assert!(run.status.success(), "{}", text(&run.stderr));
    assert!(text(&run.stdout).contains("load and resume, ms"));
    let results: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let row = &results["stock"][0];
    assert_eq!((&row["runs"], &row["trace"]), (&2.into(), &"sequential-read:4M".into()));
    assert!(row["total_ms"]["median"].as_f64() <= row["line_ms"]["max"].as_f64());
    let run = output(&[&thaw[..], &["--firecracker", program, "--concurrency", "2"]].concat());
    assert!(text(&run.stderr).contains("leave out --concurrency"), "{}", text(&run.stderr));
}

#[test]
fn two_planners_are_compared() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let results = tempfile::tempdir().unwrap();
    let (json, plot) = (results.path().join("r.json"), results.path().join("r.svg"));
    let output = output(&[
        "thaw",
        "--planner",
        "firecracker:readahead=off,dram_cached",
        "--trace",
        "sequential-read:16M",
        "--order",
        "7",
        "--runs",
        "2",
        "--dir",
        directory.path().to_str().unwrap(),
        "--json",
        json.to_str().unwrap(),
        "--plot",
        plot.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(files(directory.path()), 0, "the player is removed");
    assert_eq!(files(results.path()), 2);
    let json: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    assert!(json["host"]["kernel"].is_string() && json["host"]["medium"].is_string());
    let rows = json["results"].as_array().unwrap();
    let planners: Vec<_> = rows.iter().map(|row| row["planner"].as_str().unwrap()).collect();
    // One of several planners is measured twice, in an order that can be repeated.
    assert_eq!(planners, ["firecracker:readahead=off", "dram_cached", "firecracker:readahead=off"]);
    assert_eq!((&rows[2]["label"], &json["noise"][0]["ratio"]["pairs"]), (&"b".into(), &2.into()));
    assert_eq!((&json["version"], &json["order"]), (&1.into(), &7.into()));
    for row in rows {
        assert_eq!((&row["pages"], &row["runs"]), (&4096.into(), &2.into()));
        assert_eq!((&row["cache"], &row["concurrency"]), (&"cached".into(), &1.into()));
        assert!(row["kvm_page_faults"].as_u64().unwrap() > 0);
        assert!(row["shared_bytes"].as_u64().unwrap() >= 16 << 20);
        assert!(row["batch_dram_bytes"].as_u64() > row["batch_page_cache_bytes"].as_u64());
        for time in ["start_to_resume_ms", "resume_to_last_page_ms", "total_ms", "ns_per_page"] {
            let [min, median, p95, max] =
                ["min", "median", "p95", "max"].map(|part| row[time][part].as_f64().unwrap());
            assert!(0.0 < min && min <= median && median <= p95 && p95 <= max, "{time}");
        }
    }
    let svg = fs::read_to_string(plot).unwrap();
    assert!(svg.starts_with("<svg ") && svg.contains("dram_cached"));
    let table = text(&output.stdout);
    assert!(table.contains("sequential-read:16M") && table.contains("2 x 1"), "{table}");
}

#[test]
fn a_slower_restore_is_a_regression() {
    if !has_kvm() {
        return;
    }
    let results = tempfile::tempdir().unwrap();
    let path = |name: &str| results.path().join(name).to_str().unwrap().to_owned();
    let (old, new) = (path("old.json"), path("new.json"));
    let mut arguments = vec!["thaw", "--planner", "firecracker,dram_cached", "--runs", "5"];
    arguments.extend(["--trace", "sequential-read:1M", "--json", &old]);
    let measured = output(&arguments);
    assert!(measured.status.success(), "{}", text(&measured.stderr));
    let compared = |more: &[&str]| {
        let output = output(&[&["compare", &old, &new], more].concat());
        (output.status.code(), text(&output.stdout).to_owned(), text(&output.stderr).to_owned())
    };
    let json: Value = serde_json::from_slice(&fs::read(&old).unwrap()).unwrap();
    let write = |change: &dyn Fn(&mut Value)| {
        let mut json = json.clone();
        change(&mut json);
        fs::write(&new, json.to_string()).unwrap();
    };
    write(&|_| ());
    let (code, table, error) = compared(&[]);
    assert_eq!(code, Some(0), "{table}{error}");
    assert!(table.contains("2 rows: 0 regressions, 0 gains, 2 within the noise"), "{table}");
    write(&|json| {
        let time = &mut json["results"][1]["total_ms"];
        for part in ["median", "p95", "min", "max"] {
            time[part] = (time[part].as_f64().unwrap() * 1000.0).into();
        }
    });
    let (code, table, _) = compared(&[]);
    assert_eq!(code, Some(4), "{table}");
    let (code, object, _) = compared(&["--json"]);
    let object: Value = serde_json::from_str(&object).unwrap();
    assert_eq!((code, &object["rows"][1]["verdict"]), (Some(4), &"regression".into()));
    assert_eq!(object["rows"][1]["planner"], "dram_cached");
    write(&|json| json["host"]["kernel"] = "another".into());
    let (code, _, error) = compared(&[]);
    assert!(code == Some(1) && error.contains("different hosts"), "{error}");
}

#[test]
fn a_planner_is_compared_with_itself_on_a_cold_cache() {
    let Some(directory) = directory_on_disk() else { return };
    let json = directory.path().join("r.json");
    let mut arguments = vec!["thaw", "--planner", "firecracker,dram_cached", "--noise"];
    arguments.extend(["--trace", "sequential-write:4M", "--runs", "2", "--concurrency", "2"]);
    arguments.extend(["--cache", "cold", "--json", json.to_str().unwrap()]);
    arguments.extend(["--dir", directory.path().to_str().unwrap()]);
    let output = output(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let rows = json["results"].as_array().unwrap();
    let labels: Vec<_> = rows.iter().map(|row| row["label"].as_str().unwrap()).collect();
    assert_eq!(labels, ["a", "a", "b", "b"]);
    // One planner reads from storage while the guest waits, the other before the measurement
    // starts.
    assert!(rows[0]["preload_ms"].is_null());
    assert!(rows[1]["preload_ms"]["median"].as_f64() > Some(0.0));
    assert!(rows.iter().all(|row| row["private_bytes"].as_u64().unwrap() >= 4 << 20));
    let noise = json["noise"].as_array().unwrap();
    assert_eq!(noise.len(), 2);
    assert_eq!(noise[0]["ratio"]["pairs"], 2);
    assert!(text(&output.stdout).contains("noise: firecracker:readahead=on"));
}

/// Pages that json writes before it reads them count as free. No planner needs to read them, and
/// planners that use the free set do not read them.
#[test]
fn reads_of_free_pages_are_counted() {
    let Some(directory) = directory_on_disk() else { return };
    let traces = ["json-a", "json-b"].map(|name| load(name).unwrap());
    let layout = traces[0].trace.layout().clone();
    let mut free = PageSet::new(layout.pages());
    let touches = traces.iter().flat_map(|named| named.trace.touches());
    for touch in touches.filter(|touch| touch.access == Access::Write) {
        free.insert(layout.image_offset(touch.page * PAGE_SIZE).unwrap() / PAGE_SIZE);
    }
    for NamedTrace { name, trace } in traces {
        let path = directory.path().join(format!("{name}.trace"));
        fs::write(path, trace.with_free(free.clone()).unwrap().encode().unwrap()).unwrap();
    }
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let output = output(&[
        "thaw",
        "--planner",
        "firecracker:readahead=off,reap,faast",
        "--trace",
        &path("json-a.trace"),
        "--dense",
        "--unsanitised",
        "--runs",
        "1",
        "--concurrency",
        "2",
        "--cache",
        "cold",
        "--json",
        &path("r.json"),
        "--dir",
        &path(""),
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&fs::read(path("r.json")).unwrap()).unwrap();
    let read = |row: &Value| row["batch_free_read_bytes"].as_u64().unwrap();
    let read: Vec<u64> = json["results"].as_array().unwrap().iter().map(read).collect();
    // `firecracker` reads free pages one by one on first access, into a shared page cache. `reap`
    // reads those in the other input's working set, once for each microVM. `faast` reads only those
    // that the kernel reads ahead.
    let [on_demand, ahead, zeros, _] = read[..] else { panic!("{read:?}") };
    assert!(on_demand > 100 * PAGE_SIZE && ahead > 200 * PAGE_SIZE, "{read:?}");
    assert!(zeros * 2 < on_demand, "{read:?}");
}

/// The guest of FaaSnap's paper zeroes the pages that it frees.
#[test]
fn faasnap_has_a_guest_of_its_own_among_unsanitised_ones() {
    let Some(directory) = directory_on_disk() else { return };
    let read = |planners: &str, guest: &[&str]| {
        let json = directory.path().join("r.json");
        let mut arguments = vec!["thaw", "--trace", "json-a", "--runs", "1", "--cache", "cold"];
        arguments.extend(["--dense", "--planner", planners]);
        arguments.extend(["--json", json.to_str().unwrap()]);
        arguments.extend(["--dir", directory.path().to_str().unwrap()]);
        arguments.extend(guest);
        let output = output(&arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let json: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
        let rows = json["results"].as_array().unwrap();
        let read = |name: &str| {
            let mut rows = rows.iter();
            let row = rows.find(|row| row["planner"].as_str().unwrap().starts_with(name));
            row.unwrap()["batch_free_read_bytes"].as_u64().unwrap()
        };
        planners.split(',').map(read).collect::<Vec<u64>>()
    };
    let zeroed = read("reap,faasnap", &[]);
    let [reap, faasnap] = read("reap,faasnap", &["--unsanitised"])[..] else { panic!() };
    assert_eq!(faasnap, zeroed[1]);
    assert!(reap > 100 * PAGE_SIZE && faasnap < 10 * PAGE_SIZE, "{zeroed:?}, {reap}, {faasnap}");
    assert_eq!(read("faasnap", &["--unsanitised"]), [faasnap], "alone, too");
}

#[test]
fn untouched_pages_take_no_dram() {
    let Some(directory) = directory_on_disk() else { return };
    let json = directory.path().join("r.json");
    let mut arguments = vec!["thaw", "--planner", "firecracker:readahead=off,dram_cached"];
    arguments.extend(["--trace", "hello-a", "--runs", "1", "--cache", "cold"]);
    arguments.extend(["--json", json.to_str().unwrap()]);
    arguments.extend(["--dir", directory.path().to_str().unwrap()]);
    let output = output(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let count = |row: usize, key: &str| json["results"][row][key].as_u64().unwrap();
    assert!(count(0, "major_faults") > 500 && count(1, "major_faults") < 50);
    // All memory is checked at the end, but only touched pages are counted.
    assert!(count(0, "batch_page_cache_bytes") * 2 < count(1, "batch_page_cache_bytes"));
}

#[test]
fn a_warm_invocation_is_shown_beside_the_cold_one() {
    let Some(directory) = directory_on_disk() else { return };
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let measured = |more: &[&str]| {
        let (json, plot, dir) = (path("r.json"), path("r.svg"), path(""));
        let mut arguments = vec!["thaw", "--planner", "firecracker:readahead=on,dram_cached"];
        arguments.extend(["--trace", "hello-a", "--cache", "cold", "--runs", "2", "--dir", &dir]);
        arguments.extend(["--json", &json, "--plot", &plot]);
        arguments.extend(more);
        let output = output(&arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let json: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
        let rows = json["results"].as_array().unwrap().clone();
        (rows, fs::read_to_string(plot).unwrap(), text(&output.stdout).to_owned())
    };
    let (rows, picture, table) = measured(&["--warm", "--gaps", "1", "--again", "1000"]);
    assert_eq!(rows.len(), 3);
    for row in &rows {
        let [median, p95] = ["median", "p95"].map(|part| row["warm_ms"][part].as_f64().unwrap());
        assert!(0.0 < median && median <= p95, "{row}");
        let label = row["label"].as_str().map_or(String::new(), |label| format!(" ({label})"));
        let name = format!("{}{label}, warm", row["planner"].as_str().unwrap());
        assert!(picture.contains(&format!(">{name}<")) && table.contains(&name), "{table}");
    }
    let tables = |more: &[&str]| {
        let json = path("r.json");
        let output = output(&[&["table", &json], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).to_owned()
    };
    let plot = path("table.svg");
    let table = tables(&["--plot", &plot]);
    assert!(table.contains("`firecracker:readahead=on`, warm"), "{table}");
    assert!(fs::read_to_string(&plot).unwrap().contains(">firecracker:readahead=on, warm<"));
    let (rows, picture, table) = measured(&[]);
    assert!(rows.iter().all(|row| row.get("warm_ms").is_none()), "{rows:?}");
    assert!(!picture.contains("warm<") && !table.contains(", warm"), "{table}");
    assert!(!tables(&[]).contains("warm"));
}

/// The number of snapshots in a pool.
fn extents(pool: &MemoryPool) -> usize {
    let mut client = firn_pool::Client::connect(&pool.socket()).unwrap();
    client.list().unwrap().extents.len()
}

#[test]
fn planners_of_a_pool_are_compared_with_a_planner_of_a_directory() {
    if !has_kvm() {
        return;
    }
    let pool = MemoryPool::serve("64M", &[]);
    let json = pool.socket().with_file_name("r.json");
    let socket = pool.socket();
    let mut arguments = vec!["thaw", "--planner", "all", "--runs", "3", "--leaves", "4k"];
    arguments.extend(["--trace", "sequential-read:4M,sequential-write:4M"]);
    arguments.extend(["--pool", socket.to_str().unwrap(), "--json", json.to_str().unwrap()]);
    let output = output(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(extents(&pool), 0, "the players are removed from the pool");
    let json: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    assert!(json["host"]["medium"].as_str().unwrap().contains("pool on memfd"));
    let row = |planner: &str, trace: &str| {
        let rows = json["results"].as_array().unwrap();
        rows.iter().find(|row| row["planner"] == planner && row["trace"] == trace).unwrap().clone()
    };
    let (read, write) = ("sequential-read:4M", "sequential-write:4M");
    let shared = row("pass_shared", read);
    assert_eq!(
        (&shared["cache"], &shared["batch_page_cache_bytes"]),
        (&"unused".into(), &0.into())
    );
    assert!(shared["pool_bytes"].as_u64().unwrap() >= 4 << 20);
    assert!(shared["index_ms"]["median"].as_f64() > Some(0.0));
    assert!(shared["imaging_ms"].is_null());
    assert!(row("pass_shared", write)["private_bytes"].as_u64().unwrap() >= 4 << 20);
    // A replica is in the pool, including the pages that the guest writes.
    let own = row("pass", write);
    assert_eq!((&own["private_bytes"], &own["shared_bytes"]), (&0.into(), &0.into()));
    assert!(!own["imaging_ms"].is_null());
    assert_eq!(row("firecracker:readahead=on", read)["cache"], "cached");
}

#[test]
fn all_omits_planners_whose_replicas_do_not_fit_into_the_pool() {
    if !has_kvm() {
        return;
    }
    let pool = MemoryPool::serve("64M", &[]);
    let json = pool.socket().with_file_name("r.json");
    let socket = pool.socket();
    let mut arguments = vec!["thaw", "--planner", "all", "--runs", "1", "--concurrency", "4"];
    arguments.extend(["--trace", "sequential-read:14M"]);
    arguments.extend(["--pool", socket.to_str().unwrap(), "--json", json.to_str().unwrap()]);
    let output = output(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let planners = |list: &str| {
        let rows = json[list].as_array().unwrap().iter();
        rows.map(|row| row["planner"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(planners("results").contains(&"pass_shared".to_owned()));
    assert!(!planners("results").contains(&"pass".to_owned()));
    let left_out = json["left_out"].as_array().unwrap();
    let pass = left_out.iter().find(|row| row["planner"] == "pass").unwrap();
    let reason = pass["reason"].as_str().unwrap();
    assert!(reason.contains("room for 2 replicas, and 4 microVMs"), "{reason}");
}

#[test]
fn a_planner_of_a_pool_needs_a_pool() {
    if !has_kvm() {
        return;
    }
    let output = output(&["thaw", "--planner", "pass_shared", "--trace", "sequential-read:4M"]);
    let error = text(&output.stderr);
    assert!(!output.status.success() && error.contains("firn pool serve"), "{error}");
}

#[test]
fn a_page_that_changed_on_its_medium_fails_the_measurement() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let snapshot = directory.path().join("player");
    let trace = load("sequential-read:4M").unwrap();
    let name = trace.name.clone();
    freeze(
        &PlayerInputs::new(vec![trace]).unwrap(),
        &PlayerOptions::default(),
        KVM_DEVICE.as_ref(),
        Destination::Directory(snapshot.clone()),
        false,
    )
    .unwrap();
    let image = OpenOptions::new().write(true).open(snapshot.join("memory.img")).unwrap();
    image.write_all_at(&[0xee], 77 * 4096 + 2000).unwrap();
    let session = Session {
        program: env!("CARGO_BIN_EXE_firn-monitor").into(),
        jails: Jails::default(),
        players: vec![FrozenPlayer {
            inputs: vec![name.clone()],
            trace: name,
            snapshot,
            pooled: None,
            recorded_on: None,
            others: Vec::new(),
            sanitised: None,
        }],
        subjects: vec![Subject {
            planner: "firecracker:readahead=on".to_owned(),
            preloads: false,
            in_pool: false,
            packs: false,
            ready: false,
            jailed: true,
        }],
        runs: 3,
        warm_up: 0,
        concurrency: 2,
        replicas: None,
        caches: vec![Cache::Cached],
        faults: false,
        warm: false,
        shortened: false,
        standby: false,
        open_loop: 0,
        mix: None,
    };
    let interrupt = Interrupt::catch().unwrap();
    let host = Host::of(directory.path()).unwrap();
    let error = error_chain(&session.run(host, 1, &interrupt, &Quiet).unwrap_err());
    assert!(error.contains("firecracker:readahead=on failed on sequential-read:4M in run 1"));
    assert!(error.contains("restored wrong memory") && error.contains("0x4d"), "{error}");
}

#[test]
fn a_signal_leaves_no_files() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().to_str().unwrap();
    let mut command =
        bench(&["thaw", "--trace", "sequential-read:4M", "--runs", "1000", "--dir", dir]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    while !fs::read_dir(directory.path())
        .unwrap()
        .any(|entry| entry.unwrap().path().join("player-0-1/snapshot.firn").exists())
    {
        assert!(child.try_wait().unwrap().is_none(), "it exited before the signal");
        std::thread::sleep(Duration::from_millis(1));
    }
    let process = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
    kill_process(process, Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("ended by signal 2"), "{}", text(&output.stderr));
    assert_eq!(files(directory.path()), 0);
}

#[test]
fn the_player_is_compared_with_the_loop() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("floor.json");
    let mut arguments = vec!["floor", "--pairs", "2", "--memory", "4M"];
    arguments.extend(["--json", json.to_str().unwrap()]);
    arguments.extend(["--dir", directory.path().to_str().unwrap()]);
    let output = output(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!((&json["pages"], &json["ratio"]["pairs"]), (&1024.into(), &2.into()));
    assert!(json["floor_ns_per_page"]["min"].as_f64() > Some(0.0));
    assert_eq!(files(directory.path()), 1, "only the results remain");
    assert!(text(&output.stdout).contains("player / loop: "));
}

#[test]
fn invalid_arguments_are_rejected() {
    let refused = |arguments: &[&str], code: i32, text_of_error: &str| {
        let output = output(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        let error = text(&output.stderr);
        assert!(error.contains(text_of_error), "{arguments:?}: {error}");
    };
    let some = "sequential-read:4M";
    refused(&["thaw", "--trace", "nothing"], 1, "there is no trace \"nothing\"");
    refused(&["thaw", "--trace", "sequential-read:4X"], 1, "\"4X\" is not a valid size");
    refused(&["thaw", "--planner", "swift", "--trace", some], 1, "unknown planner \"swift\"");
    refused(&["thaw", "--trace", some, "--runs", "0"], 2, "--runs");
    refused(&["thaw", "--trace", some, "--concurrency", "0"], 2, "--concurrency");
    refused(&["thaw", "--trace", some, "--cache", "warm"], 2, "cold, cached");
    refused(&["thaw"], 2, "--trace");
    refused(&["thaw", "--trace", some, "--dir", "/no/where"], 1, "/no/where");
    refused(&["thaw", "--trace", some, "--json", "/no/where/r.json"], 1, "/no/where/r.json");
    refused(&["floor", "--pairs", "0"], 2, "--pairs");
    refused(&["floor", "--leaves", "1g"], 2, "4k, 2m");
}

#[test]
fn freezes_are_measured_into_a_directory_and_a_pool() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (medium, json) = (path("pool.img"), path("r.json"));
    let created = Command::new(FIRN)
        .args(["pool", "create", "--medium", &medium, "--size", "64M"])
        .output()
        .unwrap();
    assert!(created.status.success(), "{}", text(&created.stderr));
    let mut arguments =
        vec!["freeze", "--no-fio", "--runs", "2", "--memory", "16M", "--used", "1M"];
    arguments.extend(["--pool", &medium, "--json", &json]);
    let output = output(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("freeze, pool"), "{}", text(&output.stdout));
    assert_eq!(text(&output.stderr), "");
    let json: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let rows = json["rows"].as_array().unwrap();
    let destinations: Vec<_> = rows.iter().map(|row| row["destination"].as_str()).collect();
    assert_eq!(destinations, [Some("directory"), Some("pool")]);
    assert!(rows.iter().all(|row| row["total_ms"]["median"].as_f64() > Some(0.0)));
}

#[test]
fn a_reference_needs_fio() {
    let output = bench(&["freeze"]).env("PATH", "/nonexistent").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.contains("apt-get install fio") && error.contains("--no-fio"), "{error}");
}

#[test]
fn tiers_are_measured_once() {
    if !has_kvm() || !firn_required::has("root", rustix::process::geteuid().is_root()) {
        return;
    }
    let results = tempfile::tempdir().unwrap();
    let path = |ending: &str| results.path().join(format!("systor-table-5.{ending}"));
    let run = || {
        let out = results.path().to_str().unwrap();
        let experiment = ["paper", "systor-table-5", "--runs", "1", "--out", out];
        let cells = ["--trace", "hello-a2", "--only", "dram,dcpm"];
        let output = output(&[&experiment[..], &cells].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let json: Value = serde_json::from_slice(&fs::read(path("json")).unwrap()).unwrap();
        (text(&output.stderr).to_owned(), json)
    };
    let (notes, json) = run();
    assert!(notes.contains("hello-a2, function 1 of 1"), "{notes}");
    let tiers = |key: &str| -> Vec<&str> {
        let tiers = json[key].as_array().unwrap().iter();
        tiers.map(|cell| cell.get("tier").unwrap_or(&cell["name"]).as_str().unwrap()).collect()
    };
    assert_eq!((tiers("tiers"), tiers("cells")), (vec!["dram", "dcpm"], vec!["dram", "dcpm"]));
    assert_eq!((tiers("noise"), json["left_out"].as_object().unwrap().len()), (vec!["dram"], 0));
    for cell in json["cells"].as_array().unwrap() {
        for time in ["loading", "restoring", "connecting", "cold", "warm"] {
            assert!(cell["times"][time]["median"].as_f64().unwrap() > 0.0, "{time}: {cell}");
        }
    }
    assert_eq!(json["tiers"][1]["parameters"]["latency_ns"], 300.0);
    let svg = fs::read_to_string(path("svg")).unwrap();
    assert!(
        svg.contains("dcpm: modelled (table 1: 300 ns, 6.80 GB/s; 220 ns more a load"),
        "{svg}"
    );
    // Times of a second measurement would differ. They are compared to a ns: what is read from a
    // file may differ in the last bit.
    let times = |json: &Value| {
        let cells = ["cells", "noise"].map(|key| json[key].as_array().unwrap());
        let cells = cells.into_iter().flatten();
        let times = cells.flat_map(|cell| ["cold", "warm"].map(|time| cell["times"][time].clone()));
        times.map(|time| format!("{:.6}", time["median"].as_f64().unwrap())).collect::<Vec<_>>()
    };
    let (notes, again) = run();
    assert!(!notes.contains("function 1 of 1"), "{notes}");
    assert_eq!((times(&again), &again["tiers"]), (times(&json), &json["tiers"]));
    let wrong = output(&["paper", "systor-figure-7", "--only", "dram"]);
    let wrong = text(&wrong.stderr);
    assert!(wrong.contains("systor-figure-7 has none of these tiers; its tiers are nvme, ssd"));
}
