//! Builds the lab, the guest's files and root file systems from Debian packages, without root and
//! without changes to the system.
//!
//! Everything is built into firn's cache, keyed by a description of what it is made of, and put in
//! place by a rename. An interrupted build continues with the next call. Two builds of one cache
//! wait for each other.

mod addition;
mod apt;
mod command;
mod disk;
mod error;
mod guest;
mod image;
mod installed;
mod java;
mod kernel;
mod l1;
mod modules;
mod qemu;
mod recipes;
mod snapbpf;
mod store;

use std::collections::BTreeMap;
use std::path::Path;

pub use addition::{Addition, ParseAdditionError};
pub use error::BuildError;
pub use image::ImageBuild;

use crate::cache::cache_dir;
use apt::{Apt, Suite};
use command::Runner;
use store::Store;

/// Prints one line of progress.
pub type Progress<'a> = &'a dyn Fn(&str);

/// Builds the guest's files and the lab.
///
/// `agent` is the static program `firn-agent` for the guest's initramfs.
///
/// # Errors
///
/// See [`BuildError`]. Finished parts stay in the cache.
pub fn build(agent: &Path, progress: Progress<'_>) -> Result<(), BuildError> {
    let mut builder = Builder::open(progress)?;
    builder.guest(agent)?;
    builder.lab()
}

/// Builds the guest's files only, for a host that runs Linux guests itself.
///
/// # Errors
///
/// See [`BuildError`]. Finished parts stay in the cache.
pub fn build_guest(agent: &Path, progress: Progress<'_>) -> Result<(), BuildError> {
    Builder::open(progress)?.guest(agent)
}

/// Builds the module for the lab's kernel that `snapbpf:prefetch=kernel` needs. The system's
/// compiler is used.
///
/// # Errors
///
/// See [`BuildError`].
pub fn build_snapbpf(progress: Progress<'_>) -> Result<(), BuildError> {
    Builder::open(progress)?.snapbpf()
}

/// Builds an image and the layers that it needs. An image in the cache is built again only if its
/// contents changed.
///
/// # Errors
///
/// See [`BuildError`]. Finished layers stay in the cache.
pub fn build_image(image: &ImageBuild, progress: Progress<'_>) -> Result<(), BuildError> {
    Builder::open(progress)?.image(image)
}

/// A build in progress. It holds the cache's lock.
struct Builder<'a> {
    store: Store,
    runner: Runner,
    /// The private apt of each suite whose package lists are read.
    apts: BTreeMap<Suite, Apt>,
    progress: Progress<'a>,
}

impl<'a> Builder<'a> {
    fn open(progress: Progress<'a>) -> Result<Self, BuildError> {
        let cache = cache_dir().ok_or(BuildError::NoCache)?;
        command::require(&["apt-get", "apt-config", "dpkg-deb", "tar"])?;
        let runner = Runner::new()?;
        Ok(Self { store: Store::open(&cache)?, runner, apts: BTreeMap::new(), progress })
    }
}
