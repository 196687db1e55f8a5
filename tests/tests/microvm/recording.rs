//! A recorded invocation produces a trace of the touched pages, and its answer is unchanged.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use firn_memory::Leaf;
use firn_memory::trace::{Access, Touch, Toucher, Trace};
use firn_tests::{Function, HELLO, MMAP, READ_LIST, World, frozen, together, workshop};
use serde_json::{Value, json};

/// Records an invocation with all walls around the guest, whose answer is as ever.
fn record_hello(world: &World, file: &Path, options: &[&str]) -> Value {
    let record = world.firn(["record", "--json"]).args(options);
    let record = record.args(["--invoke", HELLO.input_a, "--input", "a", "--out"]);
    let report = record.arg(file).arg(frozen(&HELLO)).run().json();
    world.assert_nothing_left();
    let expected: Value = serde_json::from_str(HELLO.expected_a).unwrap();
    assert_eq!(report["outcome"]["answer"], expected);
    report
}

#[test]
fn a_recording_of_hello_contains_every_touch() {
    let world = World::default();
    let file = world.file("hello-a.trace");
    let report = record_hello(&world, &file, &[]);

    // The reader checks that every page is in guest memory, is touched first once, and is written
    // later at most once.
    let content = fs::read(&file).unwrap();
    let trace = Trace::decode(&content).unwrap();
    assert_eq!(report["bytes"], content.len());
    let origin = trace.origin();
    assert_eq!((origin.function.as_str(), origin.input.as_str()), ("hello", "a"));
    assert!(!origin.command.contains(&world.work().display().to_string()), "{origin:?}");

    let touches = trace.touches();
    let count =
        |wanted: &dyn Fn(&Touch) -> bool| touches.iter().filter(|touch| wanted(touch)).count();
    assert_eq!(report["touches"], touches.len());
    assert_eq!(report["pages"], trace.touched_pages());
    // Touches by instructions and page walks cause KVM faults; touches by the monitor do not.
    let by_guest = count(&|touch| touch.by != Toucher::Device);
    let faults = usize::try_from(report["kvm"]["page_faults"].as_u64().unwrap()).unwrap();
    assert!(by_guest > 500 && by_guest.abs_diff(faults) < faults / 10, "{by_guest}: {report}");
    // Linux maps itself with large leaves and programs with small ones, and reads more than it
    // writes.
    let unknown = report["unknown_leaves"].as_u64().unwrap();
    assert!(unknown < trace.touched_pages() / 50, "{report}");
    assert!(count(&|touch| touch.leaf == Leaf::Size2M) > 100);
    assert!(count(&|touch| touch.leaf == Leaf::Size4K && touch.by == Toucher::Instruction) > 100);
    assert!(count(&|touch| touch.by == Toucher::Walk) > 5);
    assert!(count(&|touch| touch.by == Toucher::Device) > 5);
    let first = |access| count(&|touch: &Touch| touch.access == access);
    assert!(first(Access::Read) > first(Access::Write));
    assert!(first(Access::LaterWrite) > 50);
    // There are gaps between most touches, and their sum is less than the time in guest mode.
    assert!(count(&|touch| touch.gap > 0) > touches.len() / 4);
    assert_eq!(report["worked"], touches.iter().map(|touch| touch.gap).sum::<u64>());
}

/// The reader checks that repeats are of pages that were touched before.
#[test]
fn a_recording_repeats_accesses_and_has_a_second_invocation() {
    let world = World::default();
    let file = world.file("hello-a2.trace");
    let holders = world.file("hello-a2.json");
    let options = ["--again", "150000000", "--holders", holders.to_str().unwrap()];
    let report = record_hello(&world, &file, &options);

    let trace = Trace::decode(&fs::read(&file).unwrap()).unwrap();
    let again = trace.again().unwrap();
    assert_eq!(again.period, 150_000_000);
    let recorded = json!({
        "request": again.request,
        "repeats": again.repeats.len(),
        "second": again.second.len(),
    });
    assert_eq!(report["again"], recorded);
    // The guest wakes, gets an identity and a connection before the request.
    assert!(again.request > 100 && again.request < trace.accesses().count(), "{report}");
    assert!(!again.repeats.is_empty(), "{report}");
    // The second invocation runs the same code: most of what it accesses was touched before.
    let touched: HashSet<u64> = trace.touches().iter().map(|touch| touch.page).collect();
    let accessed: HashSet<u64> = again.second.iter().map(|touch| touch.page).collect();
    let known = accessed.intersection(&touched).count();
    assert!(accessed.len() > 100 && known * 10 > accessed.len() * 9, "{known}: {report}");

    // The guest knows what held each of the pages.
    let described: Value = serde_json::from_slice(&fs::read(&holders).unwrap()).unwrap();
    assert_eq!(described["holders"], report["holders"]);
    let pages = |name: &str| {
        let holders = report["holders"].as_array().unwrap().iter();
        let held = holders.filter(|holder| holder["name"].as_str().unwrap().starts_with(name));
        held.map(|holder| holder["pages"].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!(pages(""), trace.touched_pages());
    for name in ["kernel: code", "kernel: slab", "python3: /usr/", "python3: anonymous"] {
        assert!(pages(name) > 20, "{name}: {report}");
    }
    assert!(pages("kernel: other") < trace.touched_pages() / 4, "{report}");
    let symbols = described["pages"].as_array().unwrap().iter();
    let symbols = symbols.filter(|page| page["symbol"].is_string()).count();
    assert!(symbols as u64 >= pages("kernel: code"), "{symbols}: {report}");
}

#[test]
fn a_failed_recording_leaves_no_trace() {
    let world = World::default();
    let file = world.file("failed.trace");
    let event = json!({"module": "raises", "event": {}}).to_string();
    let record = world.firn(["record", "--invoke", &event, "--input", "a", "--out"]);
    record.arg(&file).arg(workshop()).run().function_error(&["errorType"]);
    assert!(!file.exists());

    let elsewhere = world.file("missing").join("a.trace");
    let record = world.firn(["record", "--invoke", HELLO.input_a, "--input", "a", "--out"]);
    let ran = record.arg(&elsewhere).arg(frozen(&HELLO)).run();
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{ran:#?}");
    assert!(ran.stderr.contains("cannot write the recording to"), "{ran:#?}");
}

/// FaaSnap's synthetic functions, on a machine of the usual size.
#[test]
fn read_list_reads_its_list_and_mmap_writes_one_byte_per_page() {
    let world = World::default();
    let function = together(&world.work(), &[READ_LIST, MMAP]);
    let _booted = world.firn(["boot", "--name", "small"]).arg(function).start().ready();
    let invoke = |function: &Function, event: &str| {
        let event = format!(r#"{{"function": "{}", "event": {event}}}"#, function.name);
        world.firn(["invoke", "small", &event]).run()
    };
    // The first words of the pages from 0 and 1 on, as the function writes them.
    let word = |page: u64| ((page * 2_654_435_761 + 1) % (1 << 32)) | 1;
    let sum: u64 = (0..256).map(word).sum();
    let answer = invoke(&READ_LIST, r#"{"mebibytes": 1}"#).json();
    assert_eq!(answer, json!({"pages": 256, "sum": sum}));
    invoke(&READ_LIST, READ_LIST.input_a).function_error(&["boot with more memory"]);
    let answer = invoke(&MMAP, r#"{"mebibytes": 4, "value": 7}"#).json();
    assert_eq!(answer, json!({"pages": 1024, "last": 7, "beside": 0}));
}
