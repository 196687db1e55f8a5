//! What identifies a flow.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

/// The protocol of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum FlowProtocol {
    Tcp,
    Udp,
    /// ICMP echo: the guest's port is the identifier, and the remote port is 0.
    Ping,
}

/// The addresses of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct FlowKey {
    pub(crate) protocol: FlowProtocol,
    pub(crate) guest: SocketAddr,
    pub(crate) remote: SocketAddr,
}

impl FlowKey {
    pub(crate) fn new(protocol: FlowProtocol, guest: (IpAddr, u16), remote: (IpAddr, u16)) -> Self {
        Self { protocol, guest: guest.into(), remote: remote.into() }
    }
}
