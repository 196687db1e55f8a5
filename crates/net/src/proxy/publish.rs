//! Connections of the host to published ports of the guest.

use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

use super::{MAX_FLOWS, Proxy};
use crate::broker::wire::Connection;
use crate::flow::{FlowKey, FlowProtocol};
use crate::table::Flow;
use crate::tcp::{TcpFlow, reset_socket};

/// The most flows to published ports: a small part of [`MAX_FLOWS`], so that what the guest opens
/// finds the others.
const MAX_PUBLISHED_FLOWS: usize = 512;
/// The gateway's smallest port of such a flow: DNS is below.
const FIRST_PORT: u16 = 1024;

/// Where a proxy begins with the ports. It differs from that of the last one, whose connections the
/// guest may still have.
pub(super) fn first_port(secret: &RandomState) -> u16 {
    let [a, b, ..] = secret.hash_one(FIRST_PORT).to_le_bytes();
    u16::from_le_bytes([a, b]).max(FIRST_PORT)
}

impl Proxy {
    /// The broker has accepted a connection. One too many is reset.
    pub(super) fn connected(&mut self, connection: Connection, now: Instant) {
        let Connection { guest_port, socket } = connection;
        let has_room =
            self.table.len() < MAX_FLOWS && self.table.published_flows() < MAX_PUBLISHED_FLOWS;
        let Some(key) = self.next_key(guest_port).filter(|_| has_room) else {
            self.shared.counters.flows_refused += 1;
            reset_socket(socket);
            return;
        };
        let first = self.first_number(&key, now);
        let flow = TcpFlow::call(key, first, now, &mut self.shared);
        let id = self.table.insert(key, Flow::Tcp(Box::new(flow)), now);
        self.shared.counters.flows_published += 1;
        self.set_socket(id, socket, now);
    }

    /// The addresses of a flow from the gateway to a port of the guest. `None` if there are none
    /// left.
    fn next_key(&mut self, guest_port: u16) -> Option<FlowKey> {
        let ipv4 = self.shared.link.network.ipv4;
        (FIRST_PORT..=u16::MAX).find_map(|_| {
            let port = self.next_port;
            self.next_port = port.checked_add(1).unwrap_or(FIRST_PORT);
            let (guest, gateway) = (ipv4.address.into(), ipv4.gateway.into());
            let key = FlowKey::new(FlowProtocol::Tcp, (guest, guest_port), (gateway, port));
            self.table.find(&key).is_none().then_some(key)
        })
    }
}
