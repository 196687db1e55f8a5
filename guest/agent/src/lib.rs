//! The guest's side of firn.
//!
//! The binary `firn-agent` is the first process of a microVM: it mounts the disks, switches to the
//! root file system and then serves requests over vsock. This library holds what it shares with the
//! host and what can run outside a guest:
//!
//! - [`protocol`]: messages and frames between host and guest, used by both sides;
//! - [`serve`]: the server behind the protocol: one function in one Python runtime, and the gate
//!   that keeps requests out of a clone until it has an identity of its own.
//!
//! `docs/reference/guest.md` describes both for readers.

pub mod protocol;
pub mod serve;
