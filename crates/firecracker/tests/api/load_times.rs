//! What a start takes from the start of the process, without a standby, as its client sees it.

use std::time::{Duration, Instant};

use firn_pool::Huge;
use serde_json::{Value, json};

use crate::player::{Player, has_kvm};
use crate::pools::{import_into, serve};
use crate::process::Process;

const RUNS: usize = 11;

/// From the start of the process to its first answer, of the load, and from the resume to the end
/// of the replay.
fn start(planner: &Value, load: &Value) -> [Duration; 3] {
    let mut process = Process::start();
    process.get("/version");
    let started = process.age();
    process.put("/firn/planner", planner);
    let begin = Instant::now();
    process.put("/snapshot/load", load);
    let loaded = begin.elapsed();
    let begin = Instant::now();
    process.resume();
    process.type_byte();
    let done = process.line();
    assert!(done.starts_with("DONE "), "{done}");
    let replayed = begin.elapsed();
    assert_eq!(process.line(), "END 0");
    [started, loaded, replayed]
}

/// Starts one after the other, of processes that do nothing else.
#[test]
#[ignore = "a measurement, for a release build on a quiet host"]
fn what_a_start_takes() {
    let mut times = [(); 100].map(|()| {
        let process = Process::start();
        process.get("/version");
        process.age()
    });
    times.sort();
    let [first, median, third] = [25, 50, 75].map(|at| 1e3 * times[at].as_secs_f64());
    println!("start to first answer: median {median:.2} ms, quartiles {first:.2} and {third:.2}");
}

/// The pool is of huge pages, 1.5 GiB: `sysctl vm.nr_hugepages=1536` for its replicas, too.
#[test]
#[ignore = "a measurement, for a release build on a quiet host"]
fn what_a_load_takes() {
    assert!(has_kvm(), "this needs KVM");
    println!(
        "| trace | planner | start | load | resume to DONE | total |\n|---|---|---|---|---|---|"
    );
    for trace in ["hello-a", "json-a", "image-a", "mmap-a"] {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::start();
        Player::of(dir.path(), trace).boot(&process);
        let load = process.save(dir.path());
        drop(process);
        let (socket, _server) = serve(dir.path(), 3 << 29, Some(Huge::Size2M));
        import_into(&socket, dir.path());
        for planner in ["firecracker", "pass_shared", "firn"] {
            let selected = match planner {
                "firecracker" => json!({ "planner": planner }),
                _ => json!({ "planner": planner, "pool": socket }),
            };
            // The first start learns and warms.
            start(&selected, &load);
            let mut columns = [(); 4].map(|()| Vec::new());
            for _ in 0..RUNS {
                let [started, loaded, replayed] = start(&selected, &load);
                let times = [started, loaded, replayed, started + loaded + replayed];
                for (column, time) in columns.iter_mut().zip(times) {
                    column.push(time);
                }
            }
            let [started, loaded, replayed, total] = columns.map(|mut column| {
                column.sort();
                1e3 * column[RUNS / 2].as_secs_f64()
            });
            println!(
                "| {trace} | {planner} | {started:.1} | {loaded:.1} | {replayed:.1} | {total:.1} |"
            );
        }
    }
}
