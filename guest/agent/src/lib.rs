//! The guest side of firn.
//!
//! The binary `firn-agent` is the first process of a microVM: it mounts the disks, switches to the
//! root file system and then serves requests over vsock. This library contains the parts shared
//! with the host and those that can run outside a guest:
//!
//! - [`network`]: the guest's network interfaces;
//! - [`protocol`]: messages and frames between host and guest, used by both sides;
//! - [`serve`]: the server that implements the protocol: one function in one Python runtime, and
//!   the gate that refuses requests until a clone has its own identity.
//!
//! `docs/reference/guest.md` describes both.

pub mod network;
pub mod protocol;
pub mod serve;
