//! Storage tiers: the memories and disks of a host that snapshots can be on.
//!
//! A [`Tier`] is data: a name, a medium, a capacity and a price. [`TierList`] keeps the tiers of a
//! host in a file, and [`ProbeConfig`] measures one. The study that this follows is SYSTOR '22,
//! "FaaS in the Age of (sub-)µs I/O".

mod area;
mod emulated;
mod file_system;
mod list;
mod medium;
mod probe;
mod snapshot;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use firn_base::format_bytes;
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use emulated::{DiskParameters, EmulateError, Throttle};
pub(crate) use emulated::{EmulatedDisk, ReadTimes};
pub use list::{TierList, TierListError};
pub use medium::{Space, TierMedium};
pub(crate) use probe::read_times;
pub use probe::{MicroRate, Probe, ProbeConfig, ProbeError, ReadRate, WriteCost};
pub use snapshot::{SnapshotSize, SnapshotSizeError};

/// The longest name of a tier, in bytes.
const NAME_LEN: usize = 64;
/// The largest price of a GiB. A larger one is a typing error in any currency.
const MOST_PRICE: f64 = 1e9;
/// Byte-addressable media, and the parts of an extent on them, are multiples of this.
const GRANULE: u64 = 2 << 20;

/// A memory or disk that snapshots can be on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// Its name: a-z, 0-9, `-` and `_`.
    pub name: String,
    /// The medium.
    pub medium: TierMedium,
    /// Bytes that snapshots may use.
    pub capacity: u64,
    /// The price of a GiB, in any currency.
    pub price: Price,
    /// The file system of a directory when the tier was added: its UUID, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_system: Option<String>,
}

/// The price of a GiB: a finite number from 0 on.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Price(f64);

/// A number that is no price.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is not a price: expected a number from 0 to {MOST_PRICE}, such as 7.85")]
pub struct PriceError(String);

impl Price {
    /// The amount.
    #[must_use]
    pub fn amount(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Price {
    type Error = PriceError;

    fn try_from(amount: f64) -> Result<Self, PriceError> {
        // Not a number is in no range.
        let valid = (0.0..=MOST_PRICE).contains(&amount);
        valid.then_some(Self(amount)).ok_or_else(|| PriceError(amount.to_string()))
    }
}

impl From<Price> for f64 {
    fn from(price: Price) -> Self {
        price.0
    }
}

impl FromStr for Price {
    type Err = PriceError;

    fn from_str(text: &str) -> Result<Self, PriceError> {
        let amount = text.parse::<f64>().ok().and_then(|amount| Self::try_from(amount).ok());
        amount.ok_or_else(|| PriceError(text.to_owned()))
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a tier cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TierError {
    /// The name is not valid.
    #[error("{0:?} is not a name of a tier: use 1 to {NAME_LEN} of a-z, 0-9, - and _")]
    Name(String),
    /// The capacity is zero.
    #[error("a tier of 0 bytes holds no snapshot: give a larger --capacity")]
    NoCapacity,
    /// The capacity is larger than the medium.
    #[error(
        "a capacity of {} is more than {medium} has: {}; give a smaller --capacity, or omit it",
        format_bytes(*.capacity),
        format_bytes(*.total)
    )]
    Capacity {
        /// The capacity, bytes.
        capacity: u64,
        /// The medium.
        medium: TierMedium,
        /// Bytes of the medium.
        total: u64,
    },
    /// The medium does not exist, or no longer.
    #[error("{medium} is missing: attach or mount it, or remove the tier with `firn tier rm`")]
    Missing {
        /// The medium.
        medium: TierMedium,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The path is not of the kind that the tier names.
    #[error("{medium} cannot be used: the path is {found}; {remedy}")]
    Kind {
        /// The medium.
        medium: TierMedium,
        /// What the path is.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Another file system is in the place of the tier's.
    #[error(
        "{medium} is on another file system than when the tier was added ({found}, not {expected}): mount the right \
         one, or remove the tier with `firn tier rm` and add it again"
    )]
    OtherFileSystem {
        /// The medium.
        medium: TierMedium,
        /// The file system of the tier.
        expected: String,
        /// The file system that is there.
        found: String,
    },
    /// No huge pages are reserved.
    #[error("{0} are missing: reserve some with `sysctl vm.nr_hugepages=N`")]
    NoHugePages(TierMedium),
    /// The file system is read-only.
    #[error(
        "{0} is read-only: mount the file system for writing, or choose a directory on another one"
    )]
    ReadOnly(TierMedium),
    /// The directory cannot be written.
    #[error("{medium} cannot be written: check its permissions and free space")]
    Unwritable {
        /// The medium.
        medium: TierMedium,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Too few bytes are free.
    #[error(
        "{medium} is full: {} are free and {} are needed; remove files, or give a smaller size",
        format_bytes(*.free),
        format_bytes(*.needed)
    )]
    Full {
        /// The medium.
        medium: TierMedium,
        /// Free bytes.
        free: u64,
        /// Needed bytes.
        needed: u64,
    },
    /// More is needed than the tier may hold.
    #[error(
        "the tier {name} has a capacity of {} and {} are needed: give a smaller size, or add the tier again with a \
         larger --capacity",
        format_bytes(*.capacity),
        format_bytes(*.needed)
    )]
    BeyondCapacity {
        /// The tier.
        name: String,
        /// Its capacity, bytes.
        capacity: u64,
        /// Needed bytes.
        needed: u64,
    },
    /// The kernel does not report the medium's size or file system.
    #[error("cannot read the size and the file system of {medium}")]
    Size {
        /// The medium.
        medium: TierMedium,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl Tier {
    /// A tier on a medium that this host has and can write. Without a capacity it is all of the
    /// medium.
    ///
    /// # Errors
    ///
    /// [`TierError`].
    pub fn new(
        name: &str,
        medium: TierMedium,
        capacity: Option<u64>,
        price: Price,
    ) -> Result<Self, TierError> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
        if name.is_empty() || name.len() > NAME_LEN || !name.chars().all(allowed) {
            return Err(TierError::Name(name.to_owned()));
        }
        let medium = medium.absolute();
        let total = medium.check(None)?.total;
        let capacity = capacity.unwrap_or(total);
        match capacity {
            0 => Err(TierError::NoCapacity),
            _ if capacity > total => Err(TierError::Capacity { capacity, medium, total }),
            _ => {
                let file_system = medium.file_system()?;
                Ok(Self { name: name.to_owned(), medium, capacity, price, file_system })
            }
        }
    }

    /// Checks that the medium is there and can be written, and returns its bytes.
    ///
    /// # Errors
    ///
    /// [`TierError`].
    pub fn check(&self) -> Result<Space, TierError> {
        self.medium.check(self.file_system.as_deref())
    }

    /// Bytes of the medium that can be used: those that are free, but no more than the capacity.
    #[must_use]
    pub fn usable(&self, space: Space) -> u64 {
        space.free.min(self.capacity)
    }

    /// Checks that `needed` bytes can be used now.
    ///
    /// # Errors
    ///
    /// [`TierError`].
    pub fn require(&self, needed: u64) -> Result<(), TierError> {
        let Self { name, medium, capacity, .. } = self;
        let free = self.check()?.free;
        if needed > *capacity {
            return Err(TierError::BeyondCapacity {
                name: name.clone(),
                capacity: *capacity,
                needed,
            });
        }
        if needed > free {
            return Err(TierError::Full { medium: medium.clone(), free, needed });
        }
        Ok(())
    }

    /// The price of this number of bytes.
    #[must_use]
    pub fn cost(&self, bytes: u64) -> f64 {
        bytes as f64 / f64::from(1 << 30) * self.price.amount()
    }

    /// The directory of a tier that is a file system.
    #[must_use]
    pub fn directory(&self) -> Option<PathBuf> {
        self.medium.directory().map(Path::to_owned)
    }
}

#[cfg(test)]
mod tests;
