//! Errors of a build.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use thiserror::Error;

use super::recipes::IMAGES;

/// A build failed.
#[derive(Debug, Error)]
pub enum BuildError {
    /// No variable names a folder for the cache.
    #[error("cannot find a folder for the cache: set FIRN_CACHE, XDG_CACHE_HOME or HOME")]
    NoCache,
    /// The guest's agent does not exist.
    #[error(
        "the guest's agent {path} is missing: build it with `cargo build --release -p firn-agent`, or `make build`"
    )]
    NoAgent {
        /// The expected path.
        path: PathBuf,
    },
    /// The system lacks programs.
    #[error(
        "cannot find {programs}: the lab and the guest are built from Debian packages; run this on Debian or Ubuntu, or \
         install apt, dpkg and tar"
    )]
    MissingPrograms {
        /// Their names.
        programs: String,
    },
    /// A file or folder cannot be read or written.
    #[error("cannot {action} {path}")]
    File {
        /// What failed, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A program cannot be started.
    #[error("cannot run {program}")]
    Start {
        /// The program.
        program: String,
        /// The cause.
        source: io::Error,
    },
    /// A program exited with an error.
    #[error("{program} failed ({status}); see its messages above. {hint}")]
    Program {
        /// The program.
        program: String,
        /// Its exit status.
        status: ExitStatus,
        /// What to do.
        hint: &'static str,
    },
    /// A signal stopped the build.
    #[error("the build was stopped by signal {signal}. Finished parts stay in the cache")]
    Interrupted {
        /// The signal's number.
        signal: i32,
    },
    /// The system's package sources have no usable Debian mirror.
    #[error(
        "no Debian mirror with {suite} answers: check the network, and that /etc/apt names one (suite {suite}, component \
         main)"
    )]
    NoMirror {
        /// The suite.
        suite: &'static str,
    },
    /// apt finds no way to install the packages.
    #[error("apt cannot resolve: {packages}")]
    Resolve {
        /// The packages.
        packages: String,
    },
    /// apt did not store a package's file.
    #[error("apt did not leave {package} in {folder}")]
    NotDownloaded {
        /// Name and version.
        package: String,
        /// The folder for downloads.
        folder: PathBuf,
    },
    /// A program of the tools is missing.
    #[error(
        "the tools in the cache have no program {name}; remove the cache's folder `tools` and build again"
    )]
    NoTool {
        /// The program.
        name: String,
    },
    /// The kernel package lacks a module.
    #[error("the kernel package has no module {name}")]
    NoModule {
        /// The module.
        name: String,
    },
    /// The kernel package holds an unknown format.
    #[error("{path} is compressed in an unknown format")]
    Compression {
        /// The file.
        path: PathBuf,
    },
    /// The kernel image does not contain an ELF file.
    #[error("the payload of {path} is not an ELF file")]
    NotElf {
        /// The kernel image.
        path: PathBuf,
    },
    /// The name is not one of firn's images.
    #[error("firn has no image {name}; its images are {IMAGES}")]
    UnknownImage {
        /// The name.
        name: String,
    },
    /// The name belongs to one of firn's images.
    #[error("{name} is the name of one of firn's own images; choose another name")]
    ReservedName {
        /// The name.
        name: String,
    },
    /// There is no image to add to.
    #[error("there is no image {name}; firn's own images are {IMAGES}")]
    NoImage {
        /// A name or a path.
        name: String,
    },
    /// A file or folder cannot be part of an image.
    #[error("cannot add {path} to the image: {reason}")]
    Addition {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        reason: &'static str,
    },
    /// The text is neither a name nor a path.
    #[error(
        "{place} is neither a name (1 to 64 of a-z, 0-9 and -) nor a file; write a file with its folder, such as ./{place}"
    )]
    Place {
        /// The text.
        place: String,
    },
}

impl BuildError {
    /// An error of [`BuildError::File`] for `path`.
    pub(super) fn file(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }
}
