//! How faults are resolved.

use std::fmt;

/// The granule of a fault: the number of image pages of the aligned block whose missing pages one
/// fault fills. All of them are filled from the same source as the faulting page, which is zeros or
/// the image. Its text form is `page` for one page, otherwise `granule=N`, a power of two up to
/// 512.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagerPolicy {
    granule: u64,
}

impl Default for PagerPolicy {
    /// One page.
    fn default() -> Self {
        Self { granule: 1 }
    }
}

impl PagerPolicy {
    /// The largest granule, in pages: 2 MiB.
    pub(crate) const MAX_GRANULE: u64 = 512;

    /// The policy with this granule; `None` unless it is a power of two up to 512.
    #[must_use]
    pub fn with_granule(pages: u64) -> Option<Self> {
        (pages.is_power_of_two() && pages <= Self::MAX_GRANULE).then_some(Self { granule: pages })
    }

    /// The policy of this text form.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let policy = match name.strip_prefix("granule=") {
            Some(pages) => Self::with_granule(pages.parse().ok()?)?,
            None if name == "page" => Self::default(),
            None => return None,
        };
        // Each policy has one text form.
        (policy.to_string() == name).then_some(policy)
    }

    /// The granule, in pages.
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
