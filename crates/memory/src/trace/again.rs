//! Repeated accesses: a sample of what an invocation accesses again, and a second invocation.

use firn_snapshot::{MemoryLayout, PageSet};

use super::{Access, Touch, Trace, TraceError, image_page};

/// The accesses that follow the first touches: a sample of those of the first invocation, and a
/// second invocation in the same microVM.
///
/// After each period, the next access to every page is recorded: at most one access for each page
/// and period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Again {
    /// The guest's work in a period, in the trace's [`GapUnit`](super::GapUnit).
    pub period: u64,
    /// The number of accesses, touches and repeats, before the request. They wake and connect the
    /// guest.
    pub request: usize,
    /// The repeats of the first invocation, in order.
    pub repeats: Vec<Repeat>,
    /// The accesses of the second invocation, in order: the first of every page, and repeats. The
    /// access is [`Access::Read`] or [`Access::Write`].
    pub second: Vec<Touch>,
}

/// An access to a page that was touched before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// The number of touches before it.
    pub after: usize,
    /// The access, [`Access::Read`] or [`Access::Write`]. Its gap is the work since the previous
    /// touch or repeat, and is a part of the gap of the next touch.
    pub touch: Touch,
}

impl Again {
    /// No accesses so far.
    pub(crate) fn every(period: u64) -> Self {
        Self { period, request: 0, repeats: Vec::new(), second: Vec::new() }
    }
}

impl Trace {
    /// The trace with repeated accesses.
    ///
    /// # Errors
    /// [`TraceError::Again`] unless the repeats are in order, each of a page that was touched
    /// before and, if it is a write, written before; their gaps fit into those of the touches; and
    /// all pages are in guest memory.
    pub fn with_again(mut self, again: Again) -> Result<Self, TraceError> {
        self.check(&again).map_err(TraceError::Again)?;
        self.again = Some(again);
        Ok(self)
    }

    /// The repeated accesses; `None` where they were not recorded.
    #[must_use]
    pub fn again(&self) -> Option<&Again> {
        self.again.as_ref()
    }

    /// All accesses of the first invocation in order, and whether each is a repeat. Each gap is the
    /// work since the access before.
    pub fn accesses(&self) -> impl Iterator<Item = (Touch, bool)> + '_ {
        let repeats = self.again.as_ref().map_or(&[][..], |again| &again.repeats);
        let mut repeats = repeats.iter().peekable();
        let mut touches = self.touches.iter().copied().enumerate().peekable();
        let mut repeated = 0;
        std::iter::from_fn(move || {
            let after = touches.peek().map_or(usize::MAX, |(index, _)| *index);
            if let Some(repeat) = repeats.next_if(|repeat| repeat.after <= after) {
                repeated += repeat.touch.gap;
                return Some((repeat.touch, true));
            }
            let (_, touch) = touches.next()?;
            Some((Touch { gap: touch.gap - std::mem::take(&mut repeated), ..touch }, false))
        })
    }

    fn check(&self, again: &Again) -> Result<(), &'static str> {
        let Again { period, request, repeats, second } = again;
        if *period == 0 {
            return Err("their period is 0");
        }
        if *request > self.touches.len() + repeats.len() {
            return Err("the request begins after the last access");
        }
        if !repeats.is_sorted_by_key(|repeat| repeat.after) {
            return Err("they are not in order");
        }
        let memory = self.layout.pages();
        let (mut touched, mut written) = (PageSet::new(memory), PageSet::new(memory));
        let mut repeats = repeats.iter().peekable();
        for index in 0..=self.touches.len() {
            let mut gaps = 0_u64;
            while let Some(Repeat { touch, .. }) = repeats.next_if(|repeat| repeat.after == index) {
                let image = image(&self.layout, touch)?;
                let known = match touch.access {
                    Access::Read => touched.get(image),
                    _ => written.get(image),
                };
                if !known {
                    return Err("a repeat precedes the first access or write of its page");
                }
                gaps = gaps.checked_add(touch.gap).ok_or("their gaps are too large")?;
            }
            let Some(touch) = self.touches.get(index) else { break };
            if gaps > touch.gap {
                return Err("their gaps exceed that of the next touch");
            }
            let image = image_page(&self.layout, touch.page).ok_or(OUTSIDE)?;
            touched.insert(image);
            if touch.access != Access::Read {
                written.insert(image);
            }
        }
        if repeats.next().is_some() {
            return Err("a repeat follows more touches than there are");
        }
        second.iter().try_for_each(|touch| image(&self.layout, touch).map(drop))
    }
}

const OUTSIDE: &str = "a page is outside guest memory";

/// The image page of an access that is not a later write.
fn image(layout: &MemoryLayout, touch: &Touch) -> Result<u64, &'static str> {
    if touch.access == Access::LaterWrite {
        return Err("one is a later write");
    }
    image_page(layout, touch.page).ok_or(OUTSIDE)
}
