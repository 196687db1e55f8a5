//! The lab: a Debian machine (L1) with real KVM and a real `/dev/dax0.0`, emulated by QEMU on any
//! x86-64 Linux.
//!
//! [`build()`] makes the lab and the guest's files from Debian packages, in firn's cache, without
//! root. [`run()`] executes one command in a new machine and returns its exit code. [`build_image`]
//! builds root file systems for functions. Results and counts measured in the lab are correct;
//! times are not.

mod build;
mod cache;
mod channel;
mod config;
mod devdax;
mod environment;
mod error;
mod init;
mod machine;
mod request;
mod run;

pub use build::{
    Addition, BuildError, ImageBuild, ParseAdditionError, Progress, build, build_guest,
    build_image, build_snapbpf,
};
pub use cache::{cache_dir, guest_file, is_built};
pub use channel::ReceiveError;
pub use config::RunConfig;
pub use environment::{counts_instructions, is_here};
pub use error::LabError;
pub use init::{InitError, init};
pub use request::PackError;
pub use run::{Captured, Outcome, run};
