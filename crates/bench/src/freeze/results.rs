//! The results of freezes.

use serde::{Deserialize, Serialize};

use super::{Run, Subject};
use crate::host::Host;
use crate::stats::{Comparison, Summary};
use crate::text::{number, table};

/// A freeze may take this long, in ms, however fast the medium is.
const LIMIT_MS: f64 = 150.0;
/// On a slower medium it may take this multiple of the reference.
const LIMIT_RATIO: f64 = 1.3;
const MIB: f64 = (1 << 20) as f64;

/// The results for all destinations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FreezeResults {
    /// The host, the medium of the directory, and the build.
    pub host: Host,
    /// Bytes of guest memory.
    pub memory_bytes: u64,
    /// Bytes of it that were in use.
    pub used_bytes: u64,
    /// A row for each destination.
    pub rows: Vec<FreezeRow>,
}

/// The freezes into one destination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FreezeRow {
    /// `directory` or `pool`.
    pub destination: String,
    /// The medium.
    pub medium: String,
    /// Freezes.
    pub runs: u64,
    /// From the request to the published snapshot, in ms.
    pub total_ms: Summary,
    /// Bringing all vCPUs out of guest mode, in ms.
    pub pause_ms: Summary,
    /// Reading the machine state, in ms.
    pub save_ms: Summary,
    /// Reading, digesting and writing guest memory, in ms.
    pub image_ms: Summary,
    /// Of that, reading guest memory: the sum over all threads, in ms.
    pub read_ms: Summary,
    /// Of that, finding zero pages and computing digests: the sum over all threads, in ms.
    pub digest_ms: Summary,
    /// Of that, writing: the sum over all threads, in ms.
    pub write_ms: Summary,
    /// Writing the other parts and making all bytes durable, in ms.
    pub sync_ms: Summary,
    /// Moving the snapshot to its place, in ms.
    pub publish_ms: Summary,
    /// Before the clock: the background work that the pool's manager still had to do, in ms, such
    /// as zeroing the space of the previous snapshot.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub settle_ms: Option<Summary>,
    /// Bytes written: the median.
    pub bytes_written: u64,
    /// Pages of guest memory that are zero: the median.
    pub zero_pages: u64,
    /// Zero pages that were written: the median.
    pub zero_pages_written: u64,
    /// Pages that the image stores: the median.
    pub stored_pages: u64,
    /// The same bytes, written by `fio`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reference: Option<Reference>,
    /// What the median of `total_ms` may be, in ms: 150, or 1.3 of the reference if that is more.
    pub limit_ms: f64,
}

/// `fio` beside the freezes: it writes as many bytes to a file on the same medium and syncs it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    /// The duration, in ms.
    pub fio_ms: Summary,
    /// The freeze divided by `fio`, run by run.
    pub ratio: Comparison,
}

impl Subject {
    /// The row of these runs; `None` without runs.
    pub(super) fn row(&self) -> Option<FreezeRow> {
        let runs = &self.runs;
        let ms = |of: &dyn Fn(&Run) -> u64| -> Option<Summary> {
            Summary::of(&runs.iter().map(|run| of(run) as f64 / 1e6).collect::<Vec<_>>())
        };
        let median = |of: &dyn Fn(&Run) -> u64| {
            let mut values: Vec<u64> = runs.iter().map(of).collect();
            values.sort_unstable();
            values.get(values.len() / 2).copied()
        };
        let total_ms = ms(&|run| run.total_ns)?;
        let times: Vec<(f64, f64)> = runs
            .iter()
            .filter_map(|run| Some((run.total_ns as f64 / 1e6, run.fio_ns? as f64 / 1e6)))
            .collect();
        let fio: Vec<f64> = times.iter().map(|(_, fio)| *fio).collect();
        let ratios: Vec<f64> = times.iter().map(|(freeze, fio)| freeze / fio).collect();
        let reference = Summary::of(&fio)
            .zip(Comparison::of(&ratios))
            .map(|(fio_ms, ratio)| Reference { fio_ms, ratio });
        let of_fio = reference.map_or(0.0, |reference| LIMIT_RATIO * reference.fio_ms.median);
        Some(FreezeRow {
            destination: self.name.to_owned(),
            medium: self.medium.clone(),
            runs: runs.len() as u64,
            total_ms,
            pause_ms: ms(&|run| run.report.pause_ns)?,
            save_ms: ms(&|run| run.report.save_ns)?,
            image_ms: ms(&|run| run.report.image_ns)?,
            read_ms: ms(&|run| run.report.read_ns)?,
            digest_ms: ms(&|run| run.report.digest_ns)?,
            write_ms: ms(&|run| run.report.write_ns)?,
            sync_ms: ms(&|run| run.report.sync_ns)?,
            publish_ms: ms(&|run| run.report.publish_ns)?,
            settle_ms: {
                let settled = runs.iter().filter_map(|run| run.settle_ns);
                Summary::of(&settled.map(|ns| ns as f64 / 1e6).collect::<Vec<_>>())
            },
            bytes_written: median(&|run| run.report.bytes_written)?,
            zero_pages: median(&|run| run.report.zero_pages)?,
            zero_pages_written: median(&|run| run.report.zero_pages_written)?,
            stored_pages: median(&|run| run.report.stored_pages)?,
            reference,
            limit_ms: LIMIT_MS.max(of_fio),
        })
    }
}

impl FreezeResults {
    /// The results as text for a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        const HEAD: [&str; 9] =
            ["ms", "runs", "median", "p95", "min", "max", "limit", "MiB written", "to fio"];
        const PARTS: [&str; 11] = [
            "ms, median",
            "pause",
            "save",
            "image",
            "(read)",
            "(digest)",
            "(write)",
            "sync",
            "publish",
            "settle",
            "zero pages written",
        ];
        let times = |name: String, runs: u64, times: Summary| {
            let Summary { median, p95, min, max, .. } = times;
            let times = [median, p95, min, max].map(number);
            [name, runs.to_string()].into_iter().chain(times).collect::<Vec<_>>()
        };
        let mut rows = Vec::new();
        for row in &self.rows {
            let mut freeze = times(format!("freeze, {}", row.destination), row.runs, row.total_ms);
            freeze.extend([number(row.limit_ms), number(row.bytes_written as f64 / MIB)]);
            let ratio = row.reference.map(|reference| format!("{:.2}", reference.ratio.median));
            freeze.push(ratio.unwrap_or_default());
            rows.push(freeze);
            if let Some(reference) = row.reference {
                let mut fio =
                    times(format!("fio, {}", row.destination), row.runs, reference.fio_ms);
                fio.extend([String::new(), String::new(), String::new()]);
                rows.push(fio);
            }
        }
        let parts: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|row| {
                let parts = [
                    row.pause_ms,
                    row.save_ms,
                    row.image_ms,
                    row.read_ms,
                    row.digest_ms,
                    row.write_ms,
                    row.sync_ms,
                    row.publish_ms,
                ];
                let mut cells = vec![row.destination.clone()];
                cells.extend(parts.map(|part| number(part.median)));
                cells.push(row.settle_ms.map_or(String::new(), |ms| number(ms.median)));
                cells.push(row.zero_pages_written.to_string());
                cells
            })
            .collect();
        let media: Vec<String> =
            self.rows.iter().map(|row| format!("{}: {}", row.destination, row.medium)).collect();
        format!(
            "{}\n{}\nguest of {} MiB, {} MiB in use\n{}\n{}",
            self.host.line(),
            media.join("; "),
            number(self.memory_bytes as f64 / MIB),
            number(self.used_bytes as f64 / MIB),
            table(&HEAD, &rows),
            table(&PARTS, &parts)
        )
    }
}
