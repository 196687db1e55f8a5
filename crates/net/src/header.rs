//! The header of a virtio-net frame.

/// `struct virtio_net_hdr` (virtio 1.2, 5.1.6) without `num_buffers`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameHeader {
    /// [`FrameHeader::NEEDS_CSUM`], [`FrameHeader::DATA_VALID`].
    pub flags: u8,
    /// [`FrameHeader::GSO_NONE`] and so on.
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
    /// The checksum was verified.
    pub const DATA_VALID: u8 = 2;
    /// One packet.
    pub const GSO_NONE: u8 = 0;
    /// TCP over IPv4, to be cut into packets.
    pub const GSO_TCPV4: u8 = 1;
    /// TCP over IPv6, to be cut into packets.
    pub const GSO_TCPV6: u8 = 4;
    /// A flag of `gso_type`: TCP with ECN.
    pub const GSO_ECN: u8 = 0x80;

    /// Whether the sender vouches for the checksum.
    pub(crate) const fn is_checksum_valid(&self) -> bool {
        self.flags & (Self::NEEDS_CSUM | Self::DATA_VALID) != 0
    }
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
