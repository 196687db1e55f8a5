//! The reference of a freeze: `fio` writes a file sequentially and syncs it.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;
use thiserror::Error;

/// Bytes of each write of `fio`.
const BLOCK: u64 = 1 << 20;

/// Why there is no reference.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FioError {
    /// `fio` is not installed.
    #[error(
        "fio, which writes the reference, is not installed: install it (Debian: `apt-get install fio`), or pass --no-fio"
    )]
    Missing,
    /// `fio` cannot be started.
    #[error("cannot start fio")]
    Start(#[source] io::Error),
    /// `fio` failed.
    #[error("fio failed: {0}")]
    Failed(String),
    /// The output of `fio` has no durations.
    #[error("the output of fio is not the expected JSON")]
    Output(#[from] serde_json::Error),
}

/// The part of `fio`'s JSON that is used.
#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    /// The duration of writes and sync, ms.
    job_runtime: u64,
}

/// Checks that `fio` is installed.
pub(super) fn check() -> Result<(), FioError> {
    run(Command::new("fio").arg("--version")).map(|_| ())
}

/// Lets `fio` write `bytes`, rounded to whole blocks of 1 MiB, into a new file in `folder`, sync
/// it, and remove it. Returns the duration that `fio` reports, in ns: its unit is ms.
pub(super) fn write(folder: &Path, bytes: u64) -> Result<u64, FioError> {
    let blocks = ((bytes + BLOCK / 2) / BLOCK).max(1);
    let stdout = run(Command::new("fio")
        .arg("--name=reference")
        .arg(format!("--directory={}", folder.display()))
        .arg(format!("--filename=firn-fio-{}", std::process::id()))
        .arg(format!("--size={}", blocks * BLOCK))
        .arg(format!("--bs={BLOCK}"))
        .args(["--rw=write", "--ioengine=psync", "--direct=0", "--end_fsync=1", "--unlink=1"])
        .arg("--output-format=json"))?;
    parse(&stdout)
}

pub(super) fn parse(json: &[u8]) -> Result<u64, FioError> {
    let output: Output = serde_json::from_slice(json)?;
    let job = output.jobs.first();
    let job = job.ok_or_else(|| FioError::Failed("it reports no job".to_owned()))?;
    Ok(job.job_runtime * 1_000_000)
}

fn run(command: &mut Command) -> Result<Vec<u8>, FioError> {
    let output = command.stdin(Stdio::null()).output().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => FioError::Missing,
        _ => FioError::Start(source),
    })?;
    if !output.status.success() {
        return Err(FioError::Failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(output.stdout)
}
