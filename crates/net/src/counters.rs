//! What a proxy has counted.

/// The counters of a [`Proxy`](crate::Proxy) since it was made. Bytes of frames include all
/// headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames from the guest.
    pub frames_from_guest: u64,
    /// Their bytes.
    pub bytes_from_guest: u64,
    /// Frames to the guest.
    pub frames_to_guest: u64,
    /// Their bytes.
    pub bytes_to_guest: u64,
    /// Frames from the guest that are not valid.
    pub dropped_invalid: u64,
    /// Fragments from the guest.
    pub dropped_fragments: u64,
    /// Frames from the guest for another protocol, from another address, or to a group.
    pub dropped_unsupported: u64,
    /// Datagrams and answers that found a queue full, or were larger than the MTU or the guest's
    /// buffer.
    pub dropped_full: u64,
    /// Flows that exist now.
    pub flows: u64,
    /// Flows that the guest has opened.
    pub flows_opened: u64,
    /// Flows that the host has opened to published ports.
    pub flows_published: u64,
    /// Flows that were not: too many, denied, refused by the other side, unreachable.
    pub flows_refused: u64,
    /// How often a flow has sent again what the guest did not acknowledge.
    pub retransmissions: u64,
    /// Bytes of memory that flows hold now for data in both directions.
    pub buffered: u64,
    /// The most that they ever held.
    pub buffered_peak: u64,
}
