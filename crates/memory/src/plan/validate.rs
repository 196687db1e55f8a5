//! The check that a plan restores every page exactly once, from the right place.

use firn_base::{GuestRange, ImageRange, PAGE_SIZE};
use thiserror::Error;

use super::flatten::{flatten, most_visible};
use super::{Integrity, Leaf, LoadFile, Plan, Segment, Sharing, Source, When, Work};
use crate::pager::PagerPolicy;

/// Why a plan is not valid. Each is a defect of the planner that made it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A segment, layer or step is empty.
    #[error("the {what} at {at:#x} is empty")]
    Empty {
        /// Segment, layer or step.
        what: &'static str,
        /// Its first byte.
        at: u64,
    },
    /// A range is not a multiple of its granule.
    #[error("the {what} {at:#x}, length {len:#x}, is not aligned to {align:#x} bytes")]
    Misaligned {
        /// The kind of the range.
        what: &'static str,
        /// The address or offset, in bytes.
        at: u64,
        /// The length in bytes.
        len: u64,
        /// The required alignment of both, in bytes.
        align: u64,
    },
    /// A range is not within one region of guest memory.
    #[error("the {what} {range} is not within one region of guest memory")]
    OutsideMemory {
        /// Segment, layer or step.
        what: &'static str,
        /// Its range.
        range: GuestRange,
    },
    /// A range reaches beyond the image.
    #[error("the {what} reads {range} of an image of {image_len:#x} bytes")]
    OutsideImage {
        /// Layer or step.
        what: &'static str,
        /// The range that it reads.
        range: ImageRange,
        /// The length of the image in bytes.
        image_len: u64,
    },
    /// No segment covers a page.
    #[error("no segment covers guest memory {range}")]
    Gap {
        /// The uncovered range.
        range: GuestRange,
    },
    /// A segment starts before the previous one ends.
    #[error("the segment {range} overlaps the one before it, or is out of order")]
    Overlap {
        /// The later segment.
        range: GuestRange,
    },
    /// A segment reads other pages of the image than its own.
    #[error(
        "the segment at guest address {guest:#x} reads the image at {offset:#x}, \
         but its pages are at {expected:#x}"
    )]
    WrongImageOffset {
        /// First byte of the segment.
        guest: u64,
        /// The offset in the image that it reads.
        offset: u64,
        /// The offset of its pages in the image.
        expected: u64,
    },
    /// A segment reads other pages of the copy than its own.
    #[error(
        "the segment at guest address {guest:#x} reads the copy at {offset:#x}, \
         but its pages are at {expected:#x}"
    )]
    WrongCopyOffset {
        /// First byte of the segment.
        guest: u64,
        /// The offset in the copy that it reads.
        offset: u64,
        /// The offset of its pages in the copy.
        expected: u64,
    },
    /// The copy does not hold all pages of a segment that reads it.
    #[error("the copy does not hold all of guest memory {range}")]
    NotCopied {
        /// The segment's range.
        range: GuestRange,
    },
    /// A source cannot be shared in this way.
    #[error("{source_kind} at guest address {guest:#x} cannot be mapped as {sharing}")]
    Sharing {
        /// First byte of the segment or layer.
        guest: u64,
        /// The source.
        source_kind: Source,
        /// The sharing.
        sharing: Sharing,
    },
    /// A segment claims an integrity that its source does not provide.
    #[error("{source_kind} at guest address {guest:#x} is not {integrity}")]
    Integrity {
        /// First byte of the segment.
        guest: u64,
        /// The source.
        source_kind: Source,
        /// The claimed integrity.
        integrity: Integrity,
    },
    /// No layer maps a page of a segment.
    #[error("no layer maps guest memory {range}")]
    NotMapped {
        /// The unmapped range.
        range: GuestRange,
    },
    /// The topmost layer of a page differs from its segment.
    #[error(
        "guest memory {range} is mapped from {layer_source} ({layer_sharing}), \
         but its segment is {segment_source} ({segment_sharing})"
    )]
    LayerDiffers {
        /// The range that differs.
        range: GuestRange,
        /// The source of the layer, at the start of the range.
        layer_source: Source,
        /// The sharing of the layer.
        layer_sharing: Sharing,
        /// The source of the segment, at the start of the range.
        segment_source: Source,
        /// The sharing of the segment.
        segment_sharing: Sharing,
    },
    /// The kernel would not copy a range that is to be populated, or the range is out of order.
    #[error("guest memory {range} to populate is out of order, or not a private mapping")]
    Populated {
        /// The range.
        range: GuestRange,
    },
    /// A step follows a step that runs later.
    #[error("step {index} of the schedule follows a step that runs later")]
    StepOrder {
        /// Its index in the schedule.
        index: usize,
    },
    /// A load that is not at the request, or another step that is.
    #[error(
        "step {index} of the schedule runs at the wrong time: loads, and only loads, run at the request"
    )]
    StepTime {
        /// Its index in the schedule.
        index: usize,
    },
    /// The plan names a pager policy that does not exist.
    #[error("unknown pager policy {name}; use page, or granule=2 to granule=512")]
    UnknownPager {
        /// The name.
        name: String,
    },
    /// Segments have the pager as their source but the plan names no policy, or the reverse.
    #[error(
        "the plan has pager segments without a pager policy, or a policy without pager segments"
    )]
    Pager,
    /// A packed file is installed where no pager serves memory, or while the guest runs.
    #[error("step {index} of the schedule installs pages without a pager, or after the resume")]
    Install {
        /// Its index in the schedule.
        index: usize,
    },
}

impl Plan {
    /// Checks that the segments tile guest memory exactly once, each from its own pages of the
    /// image and aligned to its leaf; that the layers flatten to the segments; that what is
    /// populated is mapped privately; and that the schedule stays within its sources. O(n log n) in
    /// the number of segments, layers and steps (a layout has few regions).
    ///
    /// # Errors
    ///
    /// The first defect, as a [`PlanError`].
    pub fn validate(&self) -> Result<(), PlanError> {
        self.check_segments()?;
        self.check_layers()?;
        self.check_flattened()?;
        self.check_populated()?;
        self.check_schedule()?;
        self.check_pager()
    }

    /// The largest number of mappings while the plan's layers are applied. The kernel may merge
    /// some.
    pub(crate) fn most_mappings(&self) -> u64 {
        most_visible(&self.layers) as u64
    }

    fn check_pager(&self) -> Result<(), PlanError> {
        let is_pagers = |s: &Segment| matches!(s.source, Source::Pager { .. });
        match &self.pager {
            Some(name) if PagerPolicy::parse(name).is_none() => {
                Err(PlanError::UnknownPager { name: name.clone() })
            }
            named if named.is_some() != self.segments.iter().any(is_pagers) => {
                Err(PlanError::Pager)
            }
            _ => Ok(()),
        }
    }

    fn check_segments(&self) -> Result<(), PlanError> {
        let mut segments = self.segments.iter().peekable();
        for region in self.layout.regions() {
            let region = GuestRange::from(region.guest_range());
            let mut covered = region.start;
            while let Some(segment) = segments.next_if(|s| s.guest.start < region.end()) {
                self.check_segment(segment)?;
                if segment.guest.start < covered {
                    return Err(PlanError::Overlap { range: segment.guest });
                }
                gap(covered, segment.guest.start)?;
                covered = segment.guest.end();
            }
            gap(covered, region.end())?;
        }
        match segments.next() {
            Some(s) => Err(PlanError::OutsideMemory { what: "segment", range: s.guest }),
            None => Ok(()),
        }
    }

    fn check_segment(&self, segment: &Segment) -> Result<(), PlanError> {
        let Segment { guest, source, sharing, leaf, integrity } = *segment;
        self.check_guest("segment", guest, leaf)?;
        check_sharing(guest, source, sharing)?;
        self.check_extent_sharing(segment)?;
        let provided = match source {
            Source::Zero | Source::Pager { .. } => integrity == Integrity::CheckedOnFill,
            // Depends on whether fs-verity protects the file.
            Source::Image { .. } | Source::Packed { .. } => {
                matches!(integrity, Integrity::CheckedByKernel | Integrity::Unchecked)
            }
            // Depends on whether the extent was verified when it was opened.
            Source::Extent { .. } | Source::Copy { .. } => {
                matches!(integrity, Integrity::CheckedAtSeal | Integrity::Unchecked)
            }
        };
        if !provided {
            return Err(PlanError::Integrity {
                guest: guest.start,
                source_kind: source,
                integrity,
            });
        }
        if let Source::Packed { offset, .. } = source {
            aligned("segment's place in the packed file", offset, guest.len, leaf)?;
        }
        if let Source::Image { offset }
        | Source::Packed { image: offset, .. }
        | Source::Pager { offset } = source
        {
            aligned("segment's image offset", offset, guest.len, leaf)?;
            let expected = self.layout.image_offset(guest.start);
            if expected != Some(offset) {
                let expected = expected.unwrap_or_default();
                return Err(PlanError::WrongImageOffset { guest: guest.start, offset, expected });
            }
        }
        if let Source::Extent { offset } = source {
            aligned("segment's place in the medium", offset, guest.len, leaf)?;
            let expected = self.extent_offset(guest.start);
            if expected != Some(offset) {
                let expected = expected.unwrap_or_default();
                return Err(PlanError::WrongImageOffset { guest: guest.start, offset, expected });
            }
        }
        if let Source::Copy { offset } = source {
            aligned("segment's place in the copy", offset, guest.len, leaf)?;
            self.check_copied(guest, offset)?;
        }
        Ok(())
    }

    /// Checks that all extent segments have the same sharing: a plan maps one extent, which is
    /// either a replica or sealed.
    fn check_extent_sharing(&self, segment: &Segment) -> Result<(), PlanError> {
        let Segment { guest, source, sharing, .. } = *segment;
        let of_extent = |segment: &&Segment| matches!(segment.source, Source::Extent { .. });
        if !of_extent(&segment) {
            return Ok(());
        }
        let first = self.segments.iter().find(of_extent);
        if first.is_some_and(|first| first.sharing != sharing) {
            return Err(PlanError::Sharing { guest: guest.start, source_kind: source, sharing });
        }
        Ok(())
    }

    /// Checks that the copy holds every page of a range, in succession from `offset` on. The pages
    /// may lie in several parts of the copy's table.
    fn check_copied(&self, guest: GuestRange, offset: u64) -> Result<(), PlanError> {
        let not_copied = PlanError::NotCopied { range: guest };
        let first = self.layout.image_offset(guest.start).ok_or_else(|| not_copied.clone())?;
        let mut at = 0;
        while at < guest.len {
            let piece = self.copies.piece(first.saturating_add(at));
            let (expected, len) = piece.ok_or_else(|| not_copied.clone())?;
            let offset = offset.saturating_add(at);
            if expected != offset {
                let guest = guest.start + at;
                return Err(PlanError::WrongCopyOffset { guest, offset, expected });
            }
            at = at.saturating_add(len);
        }
        Ok(())
    }

    /// The offset of the pages at `guest_addr` in the medium, relative to the first extent segment:
    /// an extent holds the image contiguously.
    fn extent_offset(&self, guest_addr: u64) -> Option<u64> {
        let base = self.segments.iter().find_map(|segment| match segment.source {
            Source::Extent { offset } => {
                offset.checked_sub(self.layout.image_offset(segment.guest.start)?)
            }
            _ => None,
        })?;
        base.checked_add(self.layout.image_offset(guest_addr)?)
    }

    fn check_layers(&self) -> Result<(), PlanError> {
        for layer in &self.layers {
            self.check_guest("layer", layer.guest, Leaf::Size4K)?;
            check_sharing(layer.guest, layer.source, layer.sharing)?;
            match layer.source {
                Source::Image { offset } => {
                    self.check_image("layer", ImageRange { offset, len: layer.guest.len })?;
                }
                // The visible ranges of these are compared with the segments.
                Source::Packed { offset, .. } => {
                    let what = "layer's place in the packed file";
                    aligned(what, offset, layer.guest.len, Leaf::Size4K)?;
                }
                Source::Extent { offset } => {
                    aligned("layer's place in the medium", offset, layer.guest.len, Leaf::Size4K)?;
                }
                Source::Copy { offset } => {
                    aligned("layer's place in the copy", offset, layer.guest.len, Leaf::Size4K)?;
                }
                Source::Pager { offset } => {
                    aligned("layer's place in the image", offset, layer.guest.len, Leaf::Size4K)?;
                }
                Source::Zero => {}
            }
        }
        Ok(())
    }

    /// Compares the visible ranges of the layers with the segments. Both are in ascending order,
    /// and the segments have no gap, so one pass over both finds every difference.
    fn check_flattened(&self) -> Result<(), PlanError> {
        let visible = flatten(&self.layers);
        let mut visible = visible.iter().peekable();
        for segment in &self.segments {
            let mut at = segment.guest.start;
            while at < segment.guest.end() {
                let rest = GuestRange { start: at, len: segment.guest.end() - at };
                // No visible range lies outside the regions, and the segments tile these: the next
                // visible range starts here, or a page is not mapped.
                let Some(top) = visible.peek().filter(|v| v.guest.start < rest.end()) else {
                    return Err(PlanError::NotMapped { range: rest });
                };
                if top.guest.start > at {
                    let range = GuestRange { start: at, len: top.guest.start - at };
                    return Err(PlanError::NotMapped { range });
                }
                let end = top.guest.end().min(rest.end());
                let layer = &self.layers[top.layer];
                let layer_source = layer.source.advanced(at - layer.guest.start);
                let segment_source = segment.source.advanced(at - segment.guest.start);
                if layer_source != segment_source || layer.sharing != segment.sharing {
                    return Err(PlanError::LayerDiffers {
                        range: GuestRange { start: at, len: end - at },
                        layer_source,
                        layer_sharing: layer.sharing,
                        segment_source,
                        segment_sharing: segment.sharing,
                    });
                }
                at = end;
                visible.next_if(|v| v.guest.end() <= at);
            }
        }
        Ok(())
    }

    /// Checks, in one pass over both, that segments which the kernel copies on a write contain the
    /// populated ranges.
    fn check_populated(&self) -> Result<(), PlanError> {
        let private = self.segments.iter().filter(|s| s.sharing == Sharing::PrivateCow);
        let mut private = private.map(|segment| segment.guest).peekable();
        let mut end = 0;
        for range in self.populated.iter().copied() {
            self.check_guest("populated range", range, Leaf::Size4K)?;
            while private.next_if(|segment| segment.end() <= range.start).is_some() {}
            let mut at = range.start;
            while let Some(segment) = private.peek().filter(|segment| segment.start <= at) {
                at = at.max(segment.end().min(range.end()));
                if at == range.end() {
                    break;
                }
                private.next();
            }
            if range.start < end || at < range.end() {
                return Err(PlanError::Populated { range });
            }
            end = range.end();
        }
        Ok(())
    }

    fn check_schedule(&self) -> Result<(), PlanError> {
        let mut latest = When::AtRequest;
        for (index, step) in self.schedule.iter().enumerate() {
            if step.when < latest {
                return Err(PlanError::StepOrder { index });
            }
            latest = step.when;
            let at_request = matches!(step.work, Work::Load { .. } | Work::Prefetch { .. });
            if (step.when == When::AtRequest) != at_request {
                return Err(PlanError::StepTime { index });
            }
            match step.work {
                Work::Load { file: LoadFile::Image, offset, len } => {
                    self.check_image("step", ImageRange { offset, len })?;
                }
                // The loader checks the length of the file.
                Work::Load { file: LoadFile::Packed, offset, len } => {
                    aligned("step", offset, len, Leaf::Size4K)?;
                }
                Work::Preload { image } | Work::Prefetch { image } => {
                    self.check_image("step", image)?;
                }
                Work::Index { guest } | Work::IndexCopy { guest } | Work::Populate { guest } => {
                    self.check_guest("step", guest, Leaf::Size4K)?;
                }
                Work::Install { .. } if step.when != When::BeforeResume || self.pager.is_none() => {
                    return Err(PlanError::Install { index });
                }
                Work::Install { .. } => {}
            }
        }
        Ok(())
    }

    /// A range of guest memory: not empty, aligned, and within one region.
    fn check_guest(
        &self,
        what: &'static str,
        range: GuestRange,
        leaf: Leaf,
    ) -> Result<(), PlanError> {
        if range.len == 0 {
            return Err(PlanError::Empty { what, at: range.start });
        }
        aligned(what, range.start, range.len, leaf)?;
        let end = range.start.checked_add(range.len);
        let within =
            self.layout.regions().map(|region| region.guest_range()).any(|region| {
                region.start <= range.start && end.is_some_and(|end| end <= region.end)
            });
        if within { Ok(()) } else { Err(PlanError::OutsideMemory { what, range }) }
    }

    /// A range of the image: not empty, whole pages, and within it.
    fn check_image(&self, what: &'static str, range: ImageRange) -> Result<(), PlanError> {
        if range.len == 0 {
            return Err(PlanError::Empty { what, at: range.offset });
        }
        aligned(what, range.offset, range.len, Leaf::Size4K)?;
        let image_len = self.layout.total_bytes();
        match range.offset.checked_add(range.len) {
            Some(end) if end <= image_len => Ok(()),
            _ => Err(PlanError::OutsideImage { what, range, image_len }),
        }
    }
}

const _: () = assert!(Leaf::Size4K.bytes() == PAGE_SIZE);

fn aligned(what: &'static str, at: u64, len: u64, leaf: Leaf) -> Result<(), PlanError> {
    let align = leaf.bytes();
    if at.is_multiple_of(align) && len.is_multiple_of(align) {
        return Ok(());
    }
    Err(PlanError::Misaligned { what, at, len, align })
}

fn check_sharing(guest: GuestRange, source: Source, sharing: Sharing) -> Result<(), PlanError> {
    let possible = match source {
        // One VM maps a copy, and pages that the pager fills.
        Source::Zero | Source::Copy { .. } | Source::Pager { .. } => sharing == Sharing::Exclusive,
        // A snapshot is immutable: no VM writes to the image itself.
        Source::Image { .. } | Source::Packed { .. } => sharing == Sharing::PrivateCow,
        // A VM writes to its replica. Pages of a sealed extent are copied by the kernel, or in
        // whole chunks by the monitor, so a chunk must hold nothing else.
        Source::Extent { offset } => {
            if sharing == Sharing::Shared {
                aligned("chunk of shared memory", guest.start, guest.len, Leaf::Size2M)?;
                aligned("chunk's place in the medium", offset, guest.len, Leaf::Size2M)?;
            }
            true
        }
    };
    if possible {
        return Ok(());
    }
    Err(PlanError::Sharing { guest: guest.start, source_kind: source, sharing })
}

fn gap(covered: u64, next: u64) -> Result<(), PlanError> {
    if covered >= next {
        return Ok(());
    }
    Err(PlanError::Gap { range: GuestRange { start: covered, len: next - covered } })
}
