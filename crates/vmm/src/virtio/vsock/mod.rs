//! Socket device (virtio 1.2, 5.10): streams between programs on the host and programs in the
//! guest.

mod broker;
mod connection;
mod listener;
mod muxer;
mod packet;

use std::io;
use std::os::fd::BorrowedFd;

use firn_base::num::usize_of;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;

use super::chain::ChainFault;
use super::device::{DeviceContext, VirtioDevice};
use super::error::{DeviceError, RestoreDeviceError};
use super::state::{DeviceState, VsockState};
use muxer::Muxer;
use packet::{HEADER_LEN, Header};

pub use broker::VsockBroker;
pub use listener::{BindVsockError, VsockConnector, VsockListener};
pub use muxer::VsockCounters;

/// Packets to the guest, packets from the guest, events to the guest.
const QUEUE_SIZES: [u16; 3] = [256, 256, 64];
const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;

/// The most data in one packet to the guest, as in Linux's own packets.
const MAX_DATA: usize = 64 << 10;
/// `VIRTIO_VSOCK_F_STREAM`: stream sockets, the only type of this device.
const STREAM: u32 = 0;
/// `struct virtio_vsock_event` with `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`, the only event.
const TRANSPORT_RESET: [u8; 4] = [0; 4];

/// Streams between host and guest, over a [`VsockListener`].
///
/// Connections do not survive a freeze. A transport reset event (5.10.6.7) makes a restored guest
/// that had any end them; its listening sockets stay. Until then the device requests no new
/// connection, because the guest would end it too.
#[derive(Debug)]
pub(crate) struct Vsock {
    guest_cid: u32,
    muxer: Muxer,
    transport_reset: TransportReset,
}

/// The state of a restored guest's transport reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransportReset {
    /// The guest has no old connections.
    Done,
    /// The event must be sent.
    Due,
    /// The event was sent when the driver had offered event buffers up to this index. Linux offers
    /// the buffer again after it has ended its connections.
    Sent { offered: u16 },
}

impl Vsock {
    /// A device for the guest with context id `guest_cid`, reached through `listener`.
    ///
    /// # Errors
    /// The epoll descriptor cannot be created.
    pub(crate) fn new(guest_cid: u32, listener: VsockListener) -> io::Result<Self> {
        let muxer = Muxer::new(guest_cid.into(), listener)?;
        Ok(Self { guest_cid, muxer, transport_reset: TransportReset::Done })
    }

    /// What it has done.
    pub(crate) fn counters(&self) -> VsockCounters {
        self.muxer.counters()
    }

    /// A way for this process to connect.
    #[cfg(test)]
    pub(crate) fn connector(&self) -> VsockConnector {
        self.muxer.connector()
    }

    /// The number of connections, including those that the guest has not answered.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> usize {
        self.muxer.connections()
    }

    /// The number of requests that wait for the broker.
    #[cfg(test)]
    pub(crate) fn requests(&self) -> usize {
        self.muxer.requests()
    }

    /// The number of connections that may have a packet for the guest.
    #[cfg(test)]
    pub(crate) fn ready(&self) -> usize {
        self.muxer.ready()
    }

    fn set_transport_reset(&mut self, to: TransportReset) {
        self.transport_reset = to;
        self.muxer.set_hold(to != TransportReset::Done);
    }

    fn send_event(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        let Some(queue) = context.queues.get_mut(EVENT) else { return Ok(()) };
        match self.transport_reset {
            TransportReset::Done => {}
            TransportReset::Due => {
                let Some(chain) = queue.pop(context.mem)? else { return Ok(()) };
                chain
                    .writable
                    .write_at(context.mem, 0, &TRANSPORT_RESET)
                    .map_err(|fault| queue.chain_error(fault))?;
                // Before the driver can see the event and respond.
                let offered = queue.available(context.mem)?;
                queue.notify_after(context.mem, offered)?;
                queue.push_used(context.mem, &chain, TRANSPORT_RESET.len())?;
                self.set_transport_reset(TransportReset::Sent { offered });
            }
            TransportReset::Sent { offered } => {
                if queue.available(context.mem)? != offered {
                    self.set_transport_reset(TransportReset::Done);
                }
            }
        }
        Ok(())
    }

    /// Handles packets from the guest.
    fn receive(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        let Some(queue) = context.queues.get_mut(TX) else { return Ok(()) };
        while let Some(chain) = queue.pop(context.mem)? {
            let packet = &chain.readable;
            let mut header = [0; HEADER_LEN];
            let taken = packet.read_at(context.mem, 0, &mut header).and_then(|()| {
                let header = Header::from_bytes(&header);
                let needed = HEADER_LEN.saturating_add(usize_of(header.len.into()));
                if needed > packet.len() {
                    return Err(ChainFault::TooShort { needed, found: packet.len() });
                }
                self.muxer.on_packet(&header, |data| packet.read_at(context.mem, HEADER_LEN, data))
            });
            taken.map_err(|fault| queue.chain_error(fault))?;
            queue.push_used(context.mem, &chain, 0)?;
        }
        Ok(())
    }

    /// Sends pending packets to the guest while it has buffers.
    fn send(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        let Some(queue) = context.queues.get_mut(RX) else { return Ok(()) };
        while self.muxer.has_packets()
            && let Some(chain) = queue.pop(context.mem)?
        {
            let buffer = &chain.writable;
            let too_short = ChainFault::TooShort { needed: HEADER_LEN + 1, found: buffer.len() };
            let Some(room) = buffer.len().checked_sub(HEADER_LEN).filter(|room| *room > 0) else {
                return Err(queue.chain_error(too_short));
            };
            let Some((header, data)) = self.muxer.next_packet(room.min(MAX_DATA)) else {
                queue.undo_pop(&chain);
                break;
            };
            buffer
                .write_at(context.mem, 0, &header.to_bytes())
                .and_then(|()| buffer.write_at(context.mem, HEADER_LEN, data))
                .map_err(|fault| queue.chain_error(fault))?;
            let written = HEADER_LEN + data.len();
            queue.push_used(context.mem, &chain, written)?;
        }
        Ok(())
    }
}

impl VirtioDevice for Vsock {
    fn id(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn features(&self) -> u64 {
        1 << STREAM
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config(&self) -> Vec<u8> {
        u64::from(self.guest_cid).to_le_bytes().to_vec()
    }

    fn process_queue(
        &mut self,
        index: usize,
        context: &mut DeviceContext<'_>,
    ) -> Result<(), DeviceError> {
        self.send_event(context)?;
        if index == TX {
            self.receive(context)?;
        }
        self.send(context)
    }

    fn event_source(&self) -> Option<BorrowedFd<'_>> {
        Some(self.muxer.event_source())
    }

    fn process_event(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        self.muxer.poll();
        self.send(context)
    }

    fn reset(&mut self) {
        self.muxer.reset();
        self.set_transport_reset(TransportReset::Done);
    }

    fn save(&self) -> DeviceState {
        let state = VsockState { cid: self.guest_cid, next_port: self.muxer.next_port() };
        if self.transport_reset == TransportReset::Done && self.muxer.is_quiet() {
            DeviceState::QuietVsock(state)
        } else {
            DeviceState::Vsock(state)
        }
    }

    fn restore(&mut self, state: &DeviceState, running: bool) -> Result<(), RestoreDeviceError> {
        let (saved, connected) = match state {
            DeviceState::Vsock(saved) if saved.cid == self.guest_cid => (saved, running),
            DeviceState::QuietVsock(saved) if saved.cid == self.guest_cid => (saved, false),
            _ => return Err(RestoreDeviceError::OtherDevice { id: self.id() }),
        };
        self.muxer.set_next_port(saved.next_port);
        self.set_transport_reset(if connected {
            TransportReset::Due
        } else {
            TransportReset::Done
        });
        Ok(())
    }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
