//! The metadata service of a guest, as Firecracker's MMDS: a JSON document over HTTP at a
//! link-local address.
//!
//! A [`MetadataStore`] has the document. A [`Proxy`](crate::Proxy) of
//! [`Proxy::metadata`](crate::Proxy::metadata) ends the guest's connections and answers their
//! requests from it. Version 2 requires a token of the guest: a `PUT` returns one, which ends after
//! its time to live, and is of no use to another service, such as that of a clone.
//!
//! # Bounds
//!
//! A service has at most 64 connections; a further one ends that which was unused for the longest
//! time. Each holds at most 8 KiB of a request and one answer, which is not larger than the
//! document or the request.

mod connection;
mod request;
mod response;
mod service;
mod store;
mod token;

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

pub(crate) use connection::Connection;
pub(crate) use service::Service;
pub use store::{MetadataStore, PatchMetadataError, PutMetadataError};

/// The TCP port of the service.
pub(crate) const PORT: u16 = 80;
/// The most connections of a service.
pub(crate) const MAX_CONNECTIONS: usize = 64;

/// How a guest reaches its metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetadataConfig {
    /// The service's address.
    pub address: Ipv4Addr,
    /// Whether the guest needs a token.
    pub version: MetadataVersion,
    /// Whether the guest gets text even where it accepts JSON, as from EC2's service.
    pub imds_compat: bool,
}

impl MetadataConfig {
    /// The address of the metadata services of clouds.
    pub const DEFAULT_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

    /// Whether `address` is one that a service can have: link-local, and not reserved (RFC 3927,
    /// 2.1).
    #[must_use]
    pub const fn is_valid_address(address: Ipv4Addr) -> bool {
        address.is_link_local() && !matches!(address.octets()[2], 0 | 255)
    }
}

impl Default for MetadataConfig {
    fn default() -> Self {
        let address = Self::DEFAULT_ADDRESS;
        Self { address, version: MetadataVersion::default(), imds_compat: false }
    }
}

/// A version of the metadata service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetadataVersion {
    /// A `GET` needs no token. One that it has is not checked.
    #[default]
    V1,
    /// A `GET` needs a token.
    V2,
}

#[cfg(test)]
mod tests;
