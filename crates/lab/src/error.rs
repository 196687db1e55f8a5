//! Errors of the lab.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use thiserror::Error;

use crate::build::BuildError;
use crate::channel::ReceiveError;
use crate::init::InitError;
use crate::request::PackError;

/// The lab failed. A command in the lab that fails is not an error: its exit code is the result.
#[derive(Debug, Error)]
pub enum LabError {
    /// No variable names a folder for the cache.
    #[error("cannot find a folder for the cache: set FIRN_CACHE, XDG_CACHE_HOME or HOME")]
    NoCache,
    /// A part of the lab is missing.
    #[error("the lab is not built ({missing} is missing): run `firn lab build`, or `make lab`")]
    NotBuilt {
        /// The missing file.
        missing: PathBuf,
    },
    /// The build failed.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A file of the lab's machine cannot be created or opened.
    #[error("cannot prepare {what} for the lab")]
    Prepare {
        /// The file.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The file for the persistent memory cannot be used.
    #[error("cannot use {path} as the lab's persistent memory")]
    Pmem {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file for the persistent memory has an invalid size.
    #[error(
        "cannot use {path} as the lab's persistent memory: its size of {size} bytes is not a multiple of 2 MiB, at least \
         64 MiB; name a file that does not exist, and the lab creates it"
    )]
    PmemSize {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// The file for the persistent memory has other contents.
    #[error(
        "cannot use {path} as the lab's persistent memory: it has no devdax information block; the file is unchanged. \
         Name a file that does not exist, and the lab creates it"
    )]
    PmemForeign {
        /// The file.
        path: PathBuf,
    },
    /// The inputs cannot be packed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// QEMU cannot be started.
    #[error("cannot start the lab's QEMU; `firn lab build` repairs a damaged lab")]
    Start(#[source] io::Error),
    /// L1 did not boot in time.
    #[error("the lab's machine did not boot within {seconds} s, {tries} times{}", end_of(console))]
    NoBoot {
        /// How many machines were started.
        tries: u32,
        /// The limit, in seconds.
        seconds: u64,
        /// The end of the console's log.
        console: String,
    },
    /// QEMU exited, or L1 stopped or panicked, before the command exited.
    #[error("the lab's machine stopped before the command exited ({status}){}", end_of(console))]
    Died {
        /// QEMU's exit status.
        status: ExitStatus,
        /// The end of the console's log.
        console: String,
    },
    /// The timers of L1's kernel do not work any more.
    #[error(
        "the kernel of the lab's machine has stood still for {seconds} s, as emulation sometimes makes it; run the \
         command again{}",
        end_of(console)
    )]
    Still {
        /// The limit, in seconds.
        seconds: u64,
        /// The end of the console's log.
        console: String,
    },
    /// The data from L1 is invalid.
    #[error(
        "the lab was stopped because its machine sent invalid data; check that the command does not write to /dev/vport0p1"
    )]
    Channel(#[source] ReceiveError),
    /// The lab's init in L1 reported an error.
    #[error("the lab cannot run the command: {reason}")]
    Refused {
        /// The reported error.
        reason: String,
    },
    /// The command's output cannot be written.
    #[error("cannot write the output of the command in the lab")]
    Output(#[source] io::Error),
    /// The results cannot be unpacked.
    #[error("cannot unpack the lab's results into {path}")]
    Results {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The command exceeded its time limit.
    #[error(
        "the command in the lab did not exit within {seconds} s and was stopped; raise the limit with --timeout{}",
        end_of(console)
    )]
    TimedOut {
        /// The limit, in seconds.
        seconds: u64,
        /// The end of the console's log. Usually empty.
        console: String,
    },
    /// A signal stopped the run.
    #[error("the lab was stopped by signal {signal}")]
    Interrupted {
        /// The signal's number.
        signal: i32,
    },
    /// The lab's init in L1 failed.
    #[error(transparent)]
    Init(#[from] InitError),
}

/// The words for the end of the console's log.
fn end_of(console: &str) -> String {
    match console {
        "" => String::new(),
        lines => format!("; the end of its console:\n{lines}"),
    }
}

impl LabError {
    /// The exit code of a program that reports this error: 124 for a command that exceeded its
    /// limit (as with `timeout`), 128 plus the signal's number when a signal stopped the run, 125
    /// otherwise (the lab itself failed).
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::TimedOut { .. } => 124,
            Self::Interrupted { signal } | Self::Build(BuildError::Interrupted { signal }) => {
                u8::try_from(128 + signal).unwrap_or(125)
            }
            _ => 125,
        }
    }
}
