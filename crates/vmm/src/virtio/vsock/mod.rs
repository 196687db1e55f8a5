//! Socket device (virtio 1.2, 5.10): streams between programs on the host and programs in the guest.

mod connection;
mod listener;
mod muxer;
mod packet;

use std::io;
use std::os::fd::BorrowedFd;

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;

use super::chain::{ChainFault, to_usize};
use super::device::{DeviceContext, DeviceError, RestoreDeviceError, VirtioDevice};
use super::state::{DeviceState, VsockState};
use muxer::Muxer;
use packet::{HEADER_LEN, Header};

pub use listener::{BindVsockError, VsockListener};

/// Packets to the guest, packets from the guest, events to the guest.
const QUEUE_SIZES: [u16; 3] = [256, 256, 64];
const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;

/// Most data in one packet to the guest, as in Linux's own packets.
const MOST_DATA: usize = 64 << 10;
/// `VIRTIO_VSOCK_F_STREAM`: stream sockets, which this device has alone.
const STREAM: u32 = 0;
/// `struct virtio_vsock_event` with `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`, the only event.
const TRANSPORT_RESET: [u8; 4] = [0; 4];

/// Streams between host and guest, over a [`VsockListener`].
///
/// Connections do not live through a freeze. A restored guest is told so (5.10.6.7) and ends those that it
/// had; its listening sockets stay. Until it has done so, it is asked for no new connection: it
/// would end that one too.
#[derive(Debug)]
pub(crate) struct Vsock {
    guest_cid: u64,
    muxer: Muxer,
    transport_reset: TransportReset,
}

/// How far a restored guest is with ending its old connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransportReset {
    /// There are none.
    Done,
    /// The event is to be sent.
    Due,
    /// The event was sent when the driver had offered event buffers up to this index. Linux offers the buffer
    /// again once it has ended its connections.
    Sent { offered: u16 },
}

impl Vsock {
    /// A device for the guest with context id `guest_cid`, reached through `listener`.
    ///
    /// # Errors
    /// The descriptor that watches the sockets cannot be made.
    pub(crate) fn new(guest_cid: u64, listener: VsockListener) -> io::Result<Self> {
        let muxer = Muxer::new(guest_cid, listener)?;
        Ok(Self { guest_cid, muxer, transport_reset: TransportReset::Done })
    }

    /// Connections that exist now, those that the guest has not answered included.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> usize {
        self.muxer.connections()
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
                // Before the driver can see the event, and answer.
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

    /// Takes packets from the guest.
    fn receive(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        let Some(queue) = context.queues.get_mut(TX) else { return Ok(()) };
        while let Some(chain) = queue.pop(context.mem)? {
            let packet = &chain.readable;
            let mut header = [0; HEADER_LEN];
            let taken = packet.read_at(context.mem, 0, &mut header).and_then(|()| {
                let header = Header::from_bytes(&header);
                let needed = HEADER_LEN.saturating_add(to_usize(header.len));
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

    /// Gives packets to the guest, as many as there are and it has buffers for.
    fn send(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        let Some(queue) = context.queues.get_mut(RX) else { return Ok(()) };
        while self.muxer.has_packets()
            && let Some(chain) = queue.pop(context.mem)?
        {
            let buffer = &chain.writable;
            let too_short = ChainFault::TooShort { needed: HEADER_LEN + 1, found: buffer.len() };
            let Some(most) = buffer.len().checked_sub(HEADER_LEN).filter(|most| *most > 0) else {
                return Err(queue.chain_error(too_short));
            };
            let Some((header, data)) = self.muxer.next_packet(most.min(MOST_DATA)) else {
                queue.undo_pop();
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
        self.guest_cid.to_le_bytes().to_vec()
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
        DeviceState::Vsock(VsockState { next_port: self.muxer.next_port() })
    }

    fn restore(&mut self, state: &DeviceState, running: bool) -> Result<(), RestoreDeviceError> {
        let DeviceState::Vsock(saved) = state else {
            return Err(RestoreDeviceError::OtherDevice { id: self.id() });
        };
        self.muxer.set_next_port(saved.next_port);
        self.set_transport_reset(if running { TransportReset::Due } else { TransportReset::Done });
        Ok(())
    }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
