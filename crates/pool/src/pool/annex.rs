//! Reading and writing the annex of a snapshot's extent.

use uuid::Uuid;

use super::error::MediumFailure;
use super::handles::Pin;
use super::inner::Inner;
use super::scan::length;
use crate::extent::Extent;
use crate::layout::{
    ANNEX_COPY_BYTES, ANNEX_HEAD, ANNEX_ROOM, annex_at, annex_copy_len, decode_annex, encode_annex,
    u64_at,
};
use crate::media::Medium;

/// A valid copy of an annex.
struct Copy {
    at: u64,
    sequence: u32,
    content: Vec<u8>,
}

/// The content of the annex of an extent; `None` if nothing valid is stored. An extent that is
/// freed meanwhile has no valid content.
pub(crate) fn read_annex(medium: &dyn Medium, pool: Uuid, extent: &Extent) -> Option<Vec<u8>> {
    newest(medium, pool, extent, annex_at(extent)?).map(|copy| copy.content)
}

fn newest(medium: &dyn Medium, pool: Uuid, extent: &Extent, annex: u64) -> Option<Copy> {
    let copies = [annex, annex + ANNEX_COPY_BYTES].into_iter().filter_map(|at| {
        let mut head = [0; ANNEX_HEAD];
        medium.load(at, &mut head);
        let mut bytes = vec![0; annex_copy_len(&head)?];
        medium.load(at, &mut bytes);
        let (sequence, content) = decode_annex(&bytes, pool, extent.generation)?;
        Some(Copy { at, sequence, content: content.to_vec() })
    });
    copies.max_by_key(|copy| copy.sequence)
}

impl Pin {
    /// The content of the snapshot's annex; `None` if nothing valid is stored.
    pub(crate) fn annex(&self) -> Option<Vec<u8>> {
        let inner = self.inner();
        read_annex(&**inner.medium(), inner.superblock().uuid, &self.extent())
    }

    /// Stores the content of the snapshot's annex, at most [`ANNEX_ROOM`] bytes, in place of the
    /// older of its two copies. Does nothing if the extent has no annex. A snapshot's annex has one
    /// writer at a time.
    ///
    /// # Errors
    /// The medium fails.
    pub(crate) fn set_annex(&self, content: &[u8]) -> Result<(), MediumFailure> {
        assert!(content.len() <= ANNEX_ROOM, "an annex has at most {ANNEX_ROOM} bytes");
        let extent = self.extent();
        let Some(annex) = annex_at(&extent) else { return Ok(()) };
        let inner = self.inner();
        inner.check(&mut inner.state())?;
        let uuid = inner.superblock().uuid;
        let (at, sequence) = match newest(&**inner.medium(), uuid, &extent, annex) {
            Some(newest) => {
                let other = if newest.at == annex { annex + ANNEX_COPY_BYTES } else { annex };
                (other, newest.sequence.saturating_add(1))
            }
            None => (annex, 1),
        };
        let copy = encode_annex(uuid, extent.generation, sequence, content);
        store(inner, at, &copy)
    }
}

/// Stores a copy: its bytes, fence; commit: its word. The pool stays unlocked, because a fence may
/// take long. Until the commit, the other copy has a greater sequence number than this place.
fn store(inner: &Inner, at: u64, copy: &[u8]) -> Result<(), MediumFailure> {
    let medium = inner.medium();
    let fence = || {
        let failed = |source| MediumFailure::Io { name: medium.facts().name.clone(), source };
        medium.fence().map_err(|source| {
            inner.state().failed = true;
            failed(source)
        })
    };
    medium.store(at + 8, &copy[8..]);
    medium.flush(at, length(copy));
    fence()?;
    medium.store_word(at, u64_at(copy, 0));
    medium.flush(at, 8);
    fence()
}
