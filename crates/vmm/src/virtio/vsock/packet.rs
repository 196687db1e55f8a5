//! Packets of the socket device (virtio 1.2, 5.10.6).

/// Bytes of `struct virtio_vsock_hdr`.
pub(super) const HEADER_LEN: usize = 44;
/// The host's context id.
pub(super) const HOST_CID: u64 = 2;
/// `VIRTIO_VSOCK_TYPE_STREAM`, the only supported type of socket.
pub(super) const TYPE_STREAM: u16 = 1;
/// In a shutdown packet: the sender receives no more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// In a shutdown packet: the sender sends no more.
pub(super) const SHUTDOWN_SEND: u32 = 2;
/// Both directions.
pub(super) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// The operation of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Request,
    Response,
    Reset,
    Shutdown,
    Data,
    CreditUpdate,
    CreditRequest,
}

impl Op {
    pub(super) fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }

    pub(super) fn number(self) -> u16 {
        match self {
            Self::Request => 1,
            Self::Response => 2,
            Self::Reset => 3,
            Self::Shutdown => 4,
            Self::Data => 5,
            Self::CreditUpdate => 6,
            Self::CreditRequest => 7,
        }
    }
}

/// A packet's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    /// Bytes of data after the header.
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    /// Bytes of the sender's receive buffer.
    pub(super) buf_alloc: u32,
    /// Bytes that have left that buffer, modulo 2^32.
    pub(super) fwd_cnt: u32,
}

impl Header {
    pub(super) fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        Self {
            src_cid: u64_at(0),
            dst_cid: u64_at(8),
            src_port: u32_at(16),
            dst_port: u32_at(20),
            len: u32_at(24),
            kind: u16_at(28),
            op: u16_at(30),
            flags: u32_at(32),
            buf_alloc: u32_at(36),
            fwd_cnt: u32_at(40),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let mut put = |at: usize, field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
        };
        put(0, &self.src_cid.to_le_bytes());
        put(8, &self.dst_cid.to_le_bytes());
        put(16, &self.src_port.to_le_bytes());
        put(20, &self.dst_port.to_le_bytes());
        put(24, &self.len.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.op.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        bytes
    }
}
