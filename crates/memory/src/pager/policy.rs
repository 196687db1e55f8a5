//! How faults are answered.

use std::fmt;

/// How many pages one fault brings: those of the aligned block of so many image pages that are missing and, like the page itself, to be
/// zeros or the image's. Written `page` for one, else `granule=N`, a power of two up to 512.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagerPolicy {
    granule: u64,
}

impl Default for PagerPolicy {
    /// Page by page.
    fn default() -> Self {
        Self { granule: 1 }
    }
}

impl PagerPolicy {
    /// Most pages that one fault brings: 2 MiB.
    pub const MOST: u64 = 512;

    /// One that brings `pages` at a fault; `None` where that is no power of two up to 512.
    #[must_use]
    pub fn with_granule(pages: u64) -> Option<Self> {
        (pages.is_power_of_two() && pages <= Self::MOST).then_some(Self { granule: pages })
    }

    /// The policy of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let policy = match name.strip_prefix("granule=") {
            Some(pages) => Self::with_granule(pages.parse().ok()?)?,
            None if name == "page" => Self::default(),
            None => return None,
        };
        // One way to write each.
        (policy.to_string() == name).then_some(policy)
    }

    /// Pages that one fault brings at most.
    #[must_use]
    pub fn granule(self) -> u64 {
        self.granule
    }
}

impl fmt::Display for PagerPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.granule {
            1 => f.write_str("page"),
            pages => write!(f, "granule={pages}"),
        }
    }
}
