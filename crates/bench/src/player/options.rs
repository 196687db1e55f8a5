//! Options of a player.

use std::fmt;
use std::num::NonZero;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How a player is built from a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlayerOptions {
    /// Leaves of the guest's own page tables.
    pub leaves: Leaves,
    /// The factor for the gaps between touches.
    pub gaps: GapFactor,
    /// The seed of the content of memory.
    pub seed: u64,
    /// Whether pages that the guest held free are zero if they were zero in the recorded snapshot.
    /// Otherwise all of them have content, as in a guest that has run for long and never zeroed
    /// what it freed.
    pub sanitised: bool,
    /// Repeated accesses; `None` for none.
    pub again: Option<Repeats>,
    /// Touches that connect the guest, before the first one that serves the request; `None` for
    /// what the trace has recorded.
    pub connect: Option<u64>,
    /// The model of a byte-addressable medium that guest memory is on.
    pub medium: Option<MediumModel>,
}

/// The accesses of a player to pages that were touched before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// Those of the trace.
    Recorded,
    /// One after each so many units of replayed work (instructions, or ns), of a random cache line
    /// of a random page among those touched so far.
    Random(NonZero<u32>),
}

/// A model of a byte-addressable medium: the player spins for what the medium takes longer than
/// this host's DRAM. The medium's bandwidth has no limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MediumModel {
    /// For a load from a page that the trace never writes, ns.
    pub load_ns: f64,
    /// For the copy of a page to DRAM at its first write, ns.
    pub copy_ns: f64,
}

impl Default for PlayerOptions {
    fn default() -> Self {
        Self {
            leaves: Leaves::Recorded,
            gaps: GapFactor::NONE,
            seed: 1,
            sanitised: true,
            again: None,
            connect: None,
            medium: None,
        }
    }
}

/// Leaves of the guest's own page tables. On a KVM with software page tables a mapping is large
/// only if guest and host both use a large leaf; with EPT or NPT the host's leaf alone decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leaves {
    /// The recorded leaf of each touch. 1 GiB counts as 2 MiB, because not every processor has
    /// leaves of 1 GiB.
    #[default]
    Recorded,
    /// Leaves of 4 KiB only.
    All4K,
    /// Leaves of 2 MiB only.
    All2M,
}

/// Why an option cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ParseOptionError {
    /// The leaves are unknown.
    #[error("leaves {0:?} are unknown: use recorded, 4k or 2m")]
    Leaves(String),
    /// The repeated accesses are not valid.
    #[error(
        "repeated accesses {0:?} are unknown: use recorded, or the number of instructions (or ns) between them"
    )]
    Repeats(String),
    /// The factor is not valid.
    #[error(
        "factor {0:?} is not valid: use 0 to {MOST_FACTOR}, with up to three decimals, such as 0.5"
    )]
    Factor(String),
}

const LEAVES: [(&str, Leaves); 3] =
    [("recorded", Leaves::Recorded), ("4k", Leaves::All4K), ("2m", Leaves::All2M)];

impl FromStr for Leaves {
    type Err = ParseOptionError;

    fn from_str(text: &str) -> Result<Self, ParseOptionError> {
        let found = LEAVES.iter().find(|(name, _)| *name == text);
        found.map(|(_, leaves)| *leaves).ok_or_else(|| ParseOptionError::Leaves(text.to_owned()))
    }
}

impl fmt::Display for Leaves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = LEAVES.iter().find(|(_, leaves)| leaves == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

const RECORDED: &str = "recorded";

impl FromStr for Repeats {
    type Err = ParseOptionError;

    fn from_str(text: &str) -> Result<Self, ParseOptionError> {
        if text == RECORDED {
            return Ok(Self::Recorded);
        }
        text.parse().map(Self::Random).map_err(|_| ParseOptionError::Repeats(text.to_owned()))
    }
}

impl fmt::Display for Repeats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Recorded => f.write_str(RECORDED),
            Self::Random(between) => between.fmt(f),
        }
    }
}

const MOST_FACTOR: u32 = 1000;
const DECIMALS: usize = 3;
const UNIT: u32 = 1000;

/// A factor for the gaps of a trace, exact to a thousandth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GapFactor {
    thousandths: u32,
}

impl GapFactor {
    /// No gaps, to measure page faults alone.
    pub const NONE: Self = Self { thousandths: 0 };
    /// The recorded gaps.
    pub const FULL: Self = Self { thousandths: UNIT };

    /// A gap, scaled; at most `u64::MAX`.
    pub(crate) fn scale(self, gap: u64) -> u64 {
        let scaled = u128::from(gap) * u128::from(self.thousandths) / u128::from(UNIT);
        u64::try_from(scaled).unwrap_or(u64::MAX)
    }
}

impl FromStr for GapFactor {
    type Err = ParseOptionError;

    fn from_str(text: &str) -> Result<Self, ParseOptionError> {
        let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        let written = format!("{whole}{decimals:0<DECIMALS$}");
        let thousandths = written.parse().ok().filter(|factor| {
            !whole.is_empty()
                && digits(&written)
                && decimals.len() <= DECIMALS
                && *factor <= MOST_FACTOR * UNIT
        });
        let error = || ParseOptionError::Factor(text.to_owned());
        thousandths.map(|thousandths| Self { thousandths }).ok_or_else(error)
    }
}

impl fmt::Display for GapFactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.thousandths / UNIT, self.thousandths % UNIT);
        if rest == 0 { write!(f, "{whole}") } else { write!(f, "{whole}.{rest:03}") }
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
