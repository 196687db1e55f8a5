//! The network of a microVM, without a device on the host: TCP, UDP and ICMP echo of the guest
//! become ordinary sockets.
//!
//! A [`Proxy`] is in the guest's monitor. It takes the guest's frames, ends its TCP connections,
//! and makes the frames to it. It opens no socket: a [`Broker`] outside the monitor's jail does
//! that, checks each address against a [`Policy`], and passes the connected descriptor.
//!
//! The link ends in the proxy, so all clones of a snapshot have the same addresses
//! ([`GuestNetwork`]).

mod broker;
mod buffer;
mod counters;
mod datagram;
mod flow;
mod frame;
mod header;
mod icmp;
mod neighbour;
mod network;
mod packet;
mod proxy;
mod requests;
mod seq;
mod state;
mod table;
mod tcp;

pub use broker::{Broker, ParseRuleError, Policy, RuleCount, host_resolvers};
pub use counters::Counters;
pub use header::{FrameHeader, Offloads};
pub use network::{GuestNetwork, Subnet};
pub use proxy::Proxy;
pub use state::NetworkState;
