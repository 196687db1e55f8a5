use serde_json::Value;

use super::*;
use crate::testing::{head, run, sample};

#[test]
fn a_row_summarises_every_microvm_of_every_run() {
    let row = Row::of(head(None, false), &[run(&[100, 300]), run(&[200, 600])]).unwrap();
    assert_eq!((row.runs, row.concurrency, row.pages, row.touches), (2, 2, 10, 11));
    assert_eq!(row.ns_per_page.median, 25.0);
    assert_eq!((row.ns_per_page.min, row.ns_per_page.max), (10.0, 60.0));
    // 1 + 20 + 300 + 3000 + 50000 ns.
    assert!((row.start_to_resume_ms.median - 0.053_321).abs() < 1e-9);
    assert!((row.total_ms.median - 0.053_571).abs() < 1e-9);
    assert_eq!(row.cpu_ns_per_page.median, 50_000.0);
    assert_eq!((row.kvm_page_faults, row.kvm_exits, row.major_faults), (12, 13, 2));
    assert_eq!((row.private_bytes, row.shared_bytes, row.page_table_bytes), (4096, 40960, 12288));
    // Two microVMs of one snapshot share its pages in the page cache.
    assert_eq!(row.batch_dram_bytes, 2 * (4096 + 12288) + 8192);
    assert_eq!(row.preload_ms, None);
    assert!(Row::of(head(None, false), &[]).is_none());
}

#[test]
fn noise_is_the_ratio_of_paired_runs() {
    let a: Vec<Run> = [1_000_000, 2_000_000, 4_000_000].map(|ns| run(&[ns])).into();
    let b: Vec<Run> = [2_053_321, 2_000_000, 4_000_000].map(|ns| run(&[ns])).into();
    let noise = Noise::of(&head(None, false), &a, &b).unwrap();
    assert_eq!((noise.of.as_str(), noise.ratio.pairs, noise.ratio.median), ("total_ms", 3, 1.0));
    assert!((noise.ratio.high - 2.0).abs() < 1e-9);
    let cpu = Noise::of(&head(None, true), &a, &b).unwrap();
    assert_eq!((cpu.of.as_str(), cpu.ratio.low, cpu.ratio.high), ("cpu_ns_per_page", 1.0, 1.0));
    assert!(Noise::of(&head(None, false), &[], &[]).is_none());
}

#[test]
fn eleven_runs_have_an_interval() {
    let runs: Vec<Run> = (1..=11).map(|ms| run(&[ms * 1_000_000])).collect();
    let few = Row::of(head(None, false), &runs[..10]).unwrap();
    assert_eq!((few.total_ms.ci95, few.burst_ms.unwrap().ci95), (None, None));
    assert_eq!(few.total_ms.interval(), [few.total_ms.min, few.total_ms.max]);
    let row = Row::of(head(None, false), &runs).unwrap();
    let [low, high] = row.total_ms.ci95.unwrap();
    assert!(row.total_ms.min < low && high < row.total_ms.max, "{low} to {high}");
    assert_eq!(row.burst_ms.unwrap().ci95, Some([5.0, 5.0]));
    assert_eq!((row.compared().0, row.measurements.len()), ("total_ms", 11));
    let cpu = Row::of(head(None, true), &runs).unwrap();
    assert_eq!((cpu.compared().0, &cpu.measurements[0]), ("cpu_ns_per_page", &vec![50_000.0]));
}

#[test]
fn the_json_is_as_documented() {
    let mut results = sample("firecracker:readahead=on", "t", false);
    let text = serde_json::to_string(&results).unwrap();
    assert_eq!(serde_json::from_str::<Results>(&text).unwrap(), results);
    let json: Value = serde_json::from_str(&text).unwrap();
    let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["dense", "host", "results", "unsanitised", "version", "warm_up"]);
    assert_eq!(json["version"], 1);
    for key in ["machine", "cpus", "memory_bytes", "kernel", "kvm", "medium", "commit"] {
        assert!(!json["host"][key].is_null(), "{key}");
    }
    assert_eq!(json["host"]["kvm"], "software");
    let row = &json["results"][0];
    for key in ["start_to_resume_ms", "resume_to_last_page_ms", "total_ms", "ns_per_page"] {
        for part in ["median", "p95", "min", "max", "spread"] {
            assert!(row[key][part].is_f64(), "{key}.{part}");
        }
    }
    assert_eq!((&row["planner"], &row["trace"]), (&"firecracker:readahead=on".into(), &"t".into()));
    assert_eq!((&row["concurrency"], &row["runs"]), (&2.into(), &1.into()));
    assert_eq!(row["cache"], "cold");
    // The measurements of one run of two microVMs.
    assert_eq!(row["measurements"], serde_json::json!([[1.053_321, 2.053_321]]));
    assert!(row["total_ms"].get("ci95").is_none());
    assert!(row["preload_ms"].is_null() && row.get("label").is_none());

    results.noise.extend(Noise::of(&head(Some("b"), false), &[run(&[1])], &[run(&[1])]));
    let reason = "too little memory".to_owned();
    results.left_out.push(LeftOut { planner: "dram_cached".to_owned(), reason });
    let text = serde_json::to_string(&results).unwrap();
    assert_eq!(serde_json::from_str::<Results>(&text).unwrap(), results);
}
