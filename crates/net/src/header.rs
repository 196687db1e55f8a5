//! The header of a virtio-net frame.

/// The header of a frame to the guest: `struct virtio_net_hdr` (virtio 1.2, 5.1.6) without
/// `num_buffers`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameHeader {
    /// [`FrameHeader::NEEDS_CSUM`].
    pub flags: u8,
    /// [`FrameHeader::GSO_TCPV4`], [`FrameHeader::GSO_TCPV6`], or 0 for one packet.
    pub gso_type: u8,
    /// Bytes of the headers of each packet that the frame is cut into.
    pub hdr_len: u16,
    /// Most bytes after the headers in each of these packets.
    pub gso_size: u16,
    /// Where the checksum begins, in bytes of the frame.
    pub csum_start: u16,
    /// Where the checksum is stored, in bytes after `csum_start`.
    pub csum_offset: u16,
}

impl FrameHeader {
    /// The checksum field has the sum of the pseudo header, and the rest is to be added.
    pub const NEEDS_CSUM: u8 = 1;
    /// TCP over IPv4, to be cut into packets.
    pub const GSO_TCPV4: u8 = 1;
    /// TCP over IPv6, to be cut into packets.
    pub const GSO_TCPV6: u8 = 4;
}

/// What the guest's driver accepts in frames to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Partial checksums (`VIRTIO_NET_F_GUEST_CSUM`).
    pub checksum: bool,
    /// Large segments over IPv4 (`VIRTIO_NET_F_GUEST_TSO4`).
    pub tso4: bool,
    /// Large segments over IPv6 (`VIRTIO_NET_F_GUEST_TSO6`).
    pub tso6: bool,
}
