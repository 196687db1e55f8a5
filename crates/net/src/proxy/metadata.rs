//! A network that is a metadata service alone.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Instant;

use super::Proxy;
use crate::flow::FlowKey;
use crate::metadata::{Connection, MAX_CONNECTIONS, MetadataConfig, MetadataStore, PORT, Service};
use crate::network::{GuestNetwork, Subnet};
use crate::packet::Segment;
use crate::state::SavedFlow;
use crate::table::Flow;

/// The smallest MTU of IPv4 (RFC 791).
const MIN_MTU: u16 = 68;

impl Proxy {
    /// A network of one address, that of a metadata service. It is for the frames of a guest that
    /// ask for the address or go to it, which its device selects; the guest may have any address
    /// of IPv4. `mac` is the guest's, and `mtu` its largest packet in bytes.
    ///
    /// The guest's tokens end with this proxy.
    ///
    /// # Errors
    /// The MTU is not valid, the system has no random bytes, or the epoll instance or the timer
    /// cannot be made.
    pub fn metadata(
        mac: [u8; 6],
        mtu: u16,
        config: MetadataConfig,
        store: MetadataStore,
    ) -> io::Result<Self> {
        if mtu < MIN_MTU {
            let reason = format!("an MTU of {mtu} bytes is too small for IPv4");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let (none, no_ipv6) = (Ipv4Addr::UNSPECIFIED, Ipv6Addr::UNSPECIFIED);
        let network = GuestNetwork {
            mac,
            ipv4: Subnet { address: none, prefix: 32, gateway: config.address },
            ipv6: Subnet { address: no_ipv6, prefix: 128, gateway: no_ipv6 },
            mtu,
            ..GuestNetwork::default()
        };
        let service = Service::new(config, store)?;
        Ok(Self { metadata: Some(Arc::new(service)), ..Self::with(network, None)? })
    }

    /// Opens a connection to the metadata service, if there is one and the connection is to it.
    pub(super) fn open_metadata(&mut self, key: &FlowKey, syn: &Segment<'_>, now: Instant) -> bool {
        let is_to_gateway = self.shared.link.network.is_gateway(key.remote.ip());
        let service = self.metadata.as_ref().filter(|_| is_to_gateway && key.remote.port() == PORT);
        let Some(service) = service.map(Arc::clone) else { return false };
        if self.table.len() >= MAX_CONNECTIONS {
            self.end_unused();
        }
        let mut flow = self.new_flow(*key, syn, now);
        flow.set_metadata(Connection::new(service));
        let id = self.table.insert(*key, Flow::Tcp(Box::new(flow)), now);
        self.table.changed(id, now, &mut self.shared);
        true
    }

    /// Resets the connection that was unused for the longest time.
    fn end_unused(&mut self) {
        let used = self.table.iter().filter_map(|(_, flow)| match flow {
            Flow::Tcp(flow) => Some((flow.metadata_used()?, flow.saved()?)),
            Flow::Datagram(_) => None,
        });
        let Some((_, unused)) = used.min_by_key(|(used, _)| *used) else { return };
        let SavedFlow { key, next_to_guest, next_from_guest } = unused;
        self.reset(&key, next_to_guest, Some(next_from_guest));
        if let Some(id) = self.table.find(&key) {
            self.table.remove(id, &mut self.shared);
        }
    }
}

/// Whether `address` is one that a host can have.
pub(super) fn is_host(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            !address.is_unspecified() && !address.is_multicast() && !address.is_broadcast()
        }
        IpAddr::V6(_) => false,
    }
}
