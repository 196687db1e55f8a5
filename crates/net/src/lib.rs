//! The network of a microVM, without a device on the host: TCP, UDP and ICMP echo of the guest
//! become ordinary sockets.
//!
//! A [`Proxy`] is in the guest's monitor. It takes the guest's frames, ends its TCP connections,
//! and makes the frames to it. It opens no socket: a [`Broker`] outside the monitor's jail does
//! that, checks each address against a [`Policy`], and passes the connected descriptor.
//!
//! A proxy of [`Proxy::metadata`] needs no broker: it answers the guest itself, from a
//! [`MetadataStore`].
//!
//! # What the jail must deny
//!
//! The policy holds for a monitor that is taken over if its jail denies what would send to another
//! address over a socket that it has: socket(2), connect(2), bind(2), listen(2), sendmsg(2),
//! sendmmsg(2), sendto(2) with an address, and setsockopt(2) except `SO_LINGER` and `SO_PEEK_OFF`.
//! A proxy calls epoll_create1, epoll_ctl, epoll_pwait, timerfd_create and timerfd_settime; recvmsg
//! on the broker's socket and those that it was passed; on these, sendto without an address,
//! recvfrom, readv, writev, shutdown, getsockopt (`SO_ERROR`) and setsockopt (`SO_LINGER`,
//! `SO_PEEK_OFF`); and close.
//! Its descriptors are one for each flow and three more.
//!
//! # Bounds
//!
//! A guest has at most 16,384 flows, 1,024 of them of datagrams. Each holds at most 512 KiB of data
//! from the guest and 2 MiB to it, and all of them 32 MiB in each direction and a page for each
//! flow. Datagrams that wait for their socket have 1 MiB, and segments that are read together the
//! memory of 64 frames.
//!
//! # Clones
//!
//! The link ends in the proxy, so all clones of a snapshot have the same addresses
//! ([`GuestNetwork`]). [`Proxy::save`] keeps the sequence numbers of a frozen guest's connections,
//! and [`Proxy::restore`] resets them in the thawed one.

mod broker;
mod buffer;
mod burst;
mod checksum;
mod counters;
mod datagram;
mod flow;
mod frame;
mod header;
mod icmp;
mod metadata;
mod neighbour;
mod network;
mod packet;
mod proxy;
mod requests;
mod seq;
mod state;
mod table;
mod tcp;

pub use broker::{
    Broker, BrokerError, NameError, ParseRuleError, PinTimes, Policy, PublishError,
    PublishedAddress, PublishedPort, PublishedPorts, RuleCount, host_resolvers,
};
pub use counters::Counters;
pub use frame::HEADROOM;
pub use header::{FrameHeader, Offloads};
pub use metadata::{
    MetadataConfig, MetadataStore, MetadataVersion, PatchMetadataError, PutMetadataError,
};
pub use network::{GuestNetwork, Subnet};
pub use proxy::{MAX_FLOWS, PendingResets, Proxy};
pub use state::NetworkState;
