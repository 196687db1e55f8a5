//! What SnapBPF's marking would avoid. Its guest marks the pages that its kernel allocates, and
//! their old bytes are not read (SnapBPF section 3). firn's guests mark nothing; the planners know
//! the pages that the allocator held free at the freeze.

use std::collections::HashSet;
use std::fs;

use firn_memory::trace::Trace;
use firn_tests::{JSON, World, folder};
use serde_json::json;

/// The tracepoint goes to the kernel's log from the boot on, which functions may read, and nothing
/// to the console.
const PRINTED: &str = "trace_event=kmem:mm_page_alloc tp_printk log_buf_len=64M \
     sysctl.kernel.dmesg_restrict=0 loglevel=0";

/// As many as fill some 20 MiB.
const RECORDS: u64 = 4000;

#[test]
fn the_pages_that_the_guest_allocates_after_a_thaw_are_those_that_were_free() {
    let world = World::default();
    let work = fs::read_to_string(JSON.write(&world.work()).join("handler.py")).unwrap();
    let function = folder(
        &world.work(),
        "allocations",
        include_str!("../../functions/allocations/handler.py"),
    );
    fs::write(function.join("work.py"), work).unwrap();
    fs::copy(world.work().join("json/given.py"), function.join("given.py")).unwrap();

    let boot = world.firn(["boot", "--name", "it", "--memory", "512M", "--cmdline", PRINTED]);
    let mut booted = boot.arg(function).start().ready();
    world.firn(["invoke", "it", "null"]).run().ok();
    world.firn(["freeze", "it", "snapshot"]).run().ok();
    booted.end().ok();

    // The lists of a processor, which the snapshot does not show as free, hold some hundred pages.
    let input = json!({"seed": 1, "records": RECORDS}).to_string();
    let record = world.firn(["record", "--json", "--invoke", &input, "--input", "b", "--out"]);
    let report = record.args(["it.trace", "snapshot"]).run().json();
    let answer = &report["outcome"]["answer"];
    assert_eq!(answer["answer"]["records"], RECORDS);
    let allocated: HashSet<u64> = answer["allocated"]
        .as_array()
        .unwrap()
        .iter()
        .map(|run| (run[0].as_u64().unwrap(), run[1].as_u64().unwrap()))
        .flat_map(|(first, pages)| first..first + pages)
        .collect();

    let trace = Trace::decode(&fs::read(world.file("it.trace")).unwrap()).unwrap();
    let touched: HashSet<u64> = trace.touches().iter().map(|touch| touch.page).collect();
    let held_free = trace.free().unwrap();
    let free: HashSet<u64> = touched.iter().copied().filter(|page| held_free.get(*page)).collect();
    let marked: HashSet<u64> = touched.intersection(&allocated).copied().collect();
    let both = free.intersection(&marked).count();
    let counts = format!(
        "{} pages touched: {} free at the freeze, {} allocated since, {both} both",
        touched.len(),
        free.len(),
        marked.len()
    );
    println!("{counts}");
    assert!(both * 20 > free.len() * 19 && both * 3 > marked.len() * 2, "{counts}");
    assert!(both > 1000, "{counts}");
}
