//! The user-mode network as a backend.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use firn_base::num::u64_of;
use firn_net::{FrameHeader, GuestNetwork, HEADROOM, NetworkState, Offloads, PendingResets, Proxy};
use rustix::event::epoll::EventFlags;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
};

use super::backend::{NetworkBackend, Traffic};
use super::{HEADER_LEN, MAX_FRAME, Metadata, NetworkConfig};

/// Where a packet begins in its memory.
const START: usize = HEADROOM - HEADER_LEN;

/// A user-mode network, whose sockets come from a [`Broker`](firn_net::Broker).
#[derive(Debug)]
pub(super) struct UserNetwork {
    proxy: Proxy,
    /// Memory of the packet that waits for the guest.
    packet: Vec<u8>,
    /// Bytes of that packet; 0 if none waits.
    len: usize,
}

impl UserNetwork {
    /// The network of a guest with this device, over the monitor's end of its broker. It reports
    /// its resets to those that wait for them.
    ///
    /// # Errors
    /// The MTU is too small, or an epoll instance or a timer cannot be made.
    pub(super) fn new(
        config: NetworkConfig,
        broker: OwnedFd,
        resets: PendingResets,
    ) -> io::Result<Self> {
        let NetworkConfig { mac, mtu } = config;
        let network = GuestNetwork { mac, mtu, ..GuestNetwork::default() };
        let proxy = Proxy::new(network, broker)?.with_resets(resets);
        Ok(Self { proxy, packet: Vec::new(), len: 0 })
    }

    /// The metadata service of a guest with this device.
    ///
    /// # Errors
    /// The MTU is too small, there are no random bytes, or a descriptor cannot be made.
    pub(super) fn metadata(config: NetworkConfig, metadata: Metadata) -> io::Result<Self> {
        let NetworkConfig { mac, mtu } = config;
        let Metadata { config, store } = metadata;
        let proxy = Proxy::metadata(mac, mtu, config, store)?;
        Ok(Self { proxy, packet: Vec::new(), len: 0 })
    }

    /// What the network has done.
    pub(super) fn proxied(&self) -> firn_net::Counters {
        self.proxy.counters()
    }
}

impl NetworkBackend for UserNetwork {
    fn start(&mut self, features: u64) -> io::Result<()> {
        // It may need what this driver does not accept.
        self.len = 0;
        let has = |feature: u32| features & 1 << feature != 0;
        self.proxy.set_offloads(Offloads {
            checksum: has(VIRTIO_NET_F_GUEST_CSUM),
            tso4: has(VIRTIO_NET_F_GUEST_TSO4),
            tso6: has(VIRTIO_NET_F_GUEST_TSO6),
        });
        Ok(())
    }

    fn event_sources(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        vec![(self.proxy.event_source(), EventFlags::empty())]
    }

    fn poll(&mut self) {
        self.proxy.poll();
    }

    fn packet(&mut self) -> Option<&mut [u8]> {
        if self.len == 0 {
            let (header, len) = self.proxy.receive_into(&mut self.packet, MAX_FRAME)?;
            self.packet[START..HEADROOM].copy_from_slice(&bytes_of(header));
            self.len = HEADER_LEN + len;
        }
        Some(&mut self.packet[START..START + self.len])
    }

    fn taken(&mut self) {
        self.len = 0;
    }

    fn transmit(&mut self, packets: &[&[u8]]) -> Traffic {
        let frames: Vec<&[u8]> = packets.iter().filter_map(|one| one.get(HEADER_LEN..)).collect();
        self.proxy.transmit(&frames);
        let mut traffic = Traffic::default();
        frames.iter().for_each(|frame| traffic.count(u64_of(frame.len()), true));
        traffic
    }

    fn save(&self) -> NetworkState {
        if self.len == 0 { self.proxy.save() } else { self.proxy.save_without_last() }
    }

    fn restore(&mut self, state: &NetworkState) {
        self.proxy.restore(state);
    }
}

/// The header of a packet, `struct virtio_net_hdr_v1` with one buffer.
fn bytes_of(header: FrameHeader) -> [u8; HEADER_LEN] {
    let FrameHeader { flags, gso_type, hdr_len, gso_size, csum_start, csum_offset } = header;
    let mut bytes = [0; HEADER_LEN];
    bytes[0] = flags;
    bytes[1] = gso_type;
    let fields = [hdr_len, gso_size, csum_start, csum_offset, 1];
    for (to, field) in bytes[2..].as_chunks_mut().0.iter_mut().zip(fields) {
        *to = field.to_le_bytes();
    }
    bytes
}

#[cfg(test)]
#[path = "proxy_tests.rs"]
mod tests;
