//! Helpers that tests of several modules share.

use firn_run::StartReport;
use parking_lot::{Mutex, MutexGuard};

use crate::cache::Cache;
use crate::host::{Host, KvmKind};
use crate::thaw::{Results, Row, RowHead, Run};

/// Held by every test that writes a program and starts it. A process that another test starts
/// meanwhile would inherit the open file, and the kernel does not execute a file that is open for
/// writing.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static STARTING: Mutex<()> = Mutex::new(());
    STARTING.lock()
}

/// A report as `firn thaw --json` prints it for a player.
pub(crate) const REPORT: &str = r#"{"trace":"t","planner":"firecracker:readahead=on","touches":11,"pages":10,
"times":{"process_start_ns":1,"load_ns":20,"plan_ns":300,"execute_ns":3000,"preload_ns":0,"index_ns":0,
"resume_ns":50000,"replay_ns":600000,"total_ns":654321,"verify_ns":7},
"kvm":{"page_faults":12,"exits":13,"pages_4k":10,"pages_2m":0,"pages_1g":0},
"minor_faults":14,"major_faults":2,"read_bytes":8192,"private_bytes":4096,"shared_bytes":40960,"pool_bytes":0,
"page_table_bytes":12288,"cpu_ns":500000}"#;

fn report(replay_ns: u64) -> StartReport {
    let mut report: StartReport = serde_json::from_str(REPORT).unwrap();
    report.times.replay_ns = Some(replay_ns);
    report
}

pub(crate) fn head(label: Option<&str>, oversubscribed: bool) -> RowHead {
    RowHead {
        planner: "firecracker:readahead=on".to_owned(),
        label: label.map(str::to_owned),
        trace: "t".to_owned(),
        concurrency: 2,
        cache: Cache::Cold,
        oversubscribed,
        snapshots: 1,
        recorded_on: None,
    }
}

pub(crate) fn run(replays: &[u64]) -> Run {
    Run {
        reports: replays.iter().map(|&ns| report(ns)).collect(),
        preload_ns: None,
        settle_ns: None,
        kvm_table_bytes: 0,
        cached_bytes: 8192,
        free_bytes: None,
    }
}

/// Results with one row, for other tests.
pub(crate) fn sample(planner: &str, trace: &str, oversubscribed: bool) -> Results {
    let mut row = Row::of(head(None, oversubscribed), &[run(&[1_000_000, 2_000_000])]).unwrap();
    row.planner = planner.to_owned();
    row.trace = trace.to_owned();
    let host = Host {
        machine: "2 x Some <CPU> & more, 4 GiB".to_owned(),
        cpus: 2,
        memory_bytes: 4 << 30,
        kernel: "6.12".to_owned(),
        kvm: KvmKind::Software,
        medium: "ext4 on /dev/vda".to_owned(),
        commit: "unknown".to_owned(),
    };
    Results { results: vec![row], ..Results::at(host) }
}

/// Whether every element is closed in order, every attribute is quoted, and every `&` begins an
/// entity.
pub(crate) fn well_formed(svg: &str) -> bool {
    let mut open = Vec::new();
    let mut rest = svg;
    while let Some(at) = rest.find('<') {
        let (text, tag) = rest.split_at(at);
        let Some(end) = tag.find('>') else { return false };
        let (tag, behind) = (&tag[1..end], &tag[end + 1..]);
        if text.contains('>') || !entities(text) || !entities(tag) || tag.contains('<') {
            return false;
        }
        if let Some(name) = tag.strip_prefix('/') {
            if open.pop() != Some(name) {
                return false;
            }
        } else {
            if tag.matches('"').count() % 2 != 0 {
                return false;
            }
            if !tag.ends_with('/') {
                open.push(tag.split(' ').next().unwrap_or_default());
            }
        }
        rest = behind;
    }
    open.is_empty() && rest.trim().is_empty() && !svg.contains("NaN") && !svg.contains("inf")
}

fn entities(text: &str) -> bool {
    text.split('&')
        .skip(1)
        .all(|part| ["lt;", "gt;", "amp;", "quot;"].iter().any(|entity| part.starts_with(entity)))
}
