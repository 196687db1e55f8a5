#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::Read;

use firn_vmm::SerialCounters;
use rustix::pipe::{PipeFlags, pipe_with};

use super::*;

fn written(writes: u64) -> Counters {
    Counters {
        serial: SerialCounters { writes, ..SerialCounters::default() },
        ..Counters::default()
    }
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn what_was_asked_before_the_end_replaces_nothing_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics");
    let metrics = Metrics::default();
    metrics.configure(&MetricsConfig { metrics_path: path.display().to_string() }).unwrap();
    metrics.ended(written(7));
    metrics.write(None).unwrap();
    metrics.write(Some(written(5))).unwrap();
    let found = lines(&fs::read_to_string(path).unwrap());
    let writes = found.iter().map(|line| line["uart"]["write_count"].as_u64().unwrap());
    assert_eq!(writes.collect::<Vec<_>>(), [7, 0]);
}

#[test]
fn a_flush_without_a_file_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics");
    let metrics = Metrics::default();
    metrics.count(Counter::GetVersion, false);
    metrics.flush().unwrap();
    metrics.configure(&MetricsConfig { metrics_path: path.display().to_string() }).unwrap();
    metrics.flush().unwrap();
    let found = lines(&fs::read_to_string(path).unwrap());
    assert_eq!(found[0]["get_api_requests"]["vmm_version_count"], 1);
}

#[test]
fn a_full_pipe_gets_whole_lines_later() {
    let (reader, writer) = pipe_with(PipeFlags::NONBLOCK).unwrap();
    let metrics = Metrics::default();
    metrics.0.lock().file = Some(writer.into());
    metrics.ended(written(7));
    let flushes = std::iter::repeat_with(|| metrics.flush()).take_while(Result::is_ok).count();
    assert!(flushes > 1);
    assert!(metrics.flush().is_err(), "nothing is read");
    let (mut reader, mut text) = (File::from(reader), Vec::new());
    // Until it is empty.
    let _ = reader.read_to_end(&mut text);
    metrics.flush().unwrap();
    let _ = reader.read_to_end(&mut text);
    let found = lines(std::str::from_utf8(&text).unwrap());
    let counts =
        |name: &str| found.iter().map(|line| line["logger"][name].as_u64().unwrap()).sum::<u64>();
    assert!(counts("missed_metrics_count") >= 1);
    let writes = found.iter().map(|line| line["uart"]["write_count"].as_u64().unwrap());
    assert_eq!(writes.sum::<u64>(), 7);
}
