//! Why the lab failed.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use thiserror::Error;

use super::channel::ReceiveError;
use super::init::InitError;
use super::request::PackError;
use crate::scripts::ScriptError;

/// A lab command failed. (A command run in the lab that fails is no error: its exit code is passed on.)
#[derive(Debug, Error)]
pub(crate) enum LabError {
    /// There is no place for the cache.
    #[error("firn has no folder for its cache: set FIRN_CACHE, XDG_CACHE_HOME or HOME")]
    NoCache,
    /// A part of the lab is missing.
    #[error("the lab is not built ({missing} is missing): run `firn lab build`, or `make lab`")]
    NotBuilt {
        /// The missing file.
        missing: PathBuf,
    },
    /// A build script did not do its work.
    #[error(transparent)]
    Script(#[from] ScriptError),
    /// The guest's agent, which the guest's initramfs needs, is missing.
    #[error(
        "the guest's agent {path} is missing: build it with `cargo build --release -p firn-agent`, or `make build`"
    )]
    NoAgent {
        /// Where it belongs: beside the firn program.
        path: PathBuf,
    },
    /// A file that the lab's machine needs cannot be made or opened.
    #[error("the lab cannot prepare {what}")]
    Prepare {
        /// What it is.
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// The file for the persistent memory cannot be used.
    #[error("{path} cannot back the lab's persistent memory")]
    Pmem {
        /// The file.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The file for the persistent memory has an impossible size.
    #[error(
        "{path} cannot back the lab's persistent memory: its size of {size} bytes is not a multiple of 2 MiB of at least \
         64 MiB; name a file that does not exist yet, and the lab creates it"
    )]
    PmemSize {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// An existing file is not the lab's.
    #[error(
        "{path} holds something else than the lab's persistent memory (no devdax information block), and is left alone; \
         name a file that does not exist yet, and the lab creates it"
    )]
    PmemForeign {
        /// The file.
        path: PathBuf,
    },
    /// The inputs cannot be packed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// QEMU cannot be started.
    #[error("the lab's QEMU cannot be started; `firn lab build` repairs a damaged lab")]
    Start(#[source] io::Error),
    /// L1 did not come up in time.
    #[error("the lab's machine did not come up within {seconds} s; its last words:\n{console}")]
    NoBoot {
        /// How long the lab waited.
        seconds: u64,
        /// The end of the console's log.
        console: String,
    },
    /// QEMU ended, or L1 stopped or panicked, before the command ended.
    #[error(
        "the lab's machine ended before the command did ({status}); its last words:\n{console}"
    )]
    Died {
        /// How QEMU ended.
        status: ExitStatus,
        /// The end of the console's log.
        console: String,
    },
    /// The channel from L1 is broken.
    #[error(
        "the lab's machine was stopped, because what it sends cannot be understood; was something else written to its port?"
    )]
    Channel(#[source] ReceiveError),
    /// The lab's side within L1 reported that it could not do its work.
    #[error("the lab's machine cannot run the command: {reason}")]
    Refused {
        /// Its report.
        reason: String,
    },
    /// The command's output cannot be passed on.
    #[error("the output of the command in the lab cannot be written")]
    Output(#[source] io::Error),
    /// The results cannot be put where they belong.
    #[error("the results from the lab cannot be put into {path}")]
    Results {
        /// The folder.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The command took too long.
    #[error(
        "the command in the lab did not end within {seconds} s and was stopped; allow more with --timeout"
    )]
    TimedOut {
        /// The limit.
        seconds: u64,
    },
    /// A signal ended the run.
    #[error("the lab was stopped by signal {signal}")]
    Interrupted {
        /// The signal's number.
        signal: i32,
    },
    /// The lab's side within L1 failed.
    #[error(transparent)]
    Init(#[from] InitError),
}

impl LabError {
    /// The exit code of a program that ends with this error: 124 for a command that took too long (as `timeout` has it), 128 plus
    /// the signal's number when one ended the run, otherwise 125 (the lab itself failed).
    #[must_use]
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::TimedOut { .. } => 124,
            Self::Interrupted { signal }
            | Self::Script(ScriptError::Interrupted { signal, .. }) => {
                u8::try_from(128 + signal).unwrap_or(125)
            }
            _ => 125,
        }
    }
}
