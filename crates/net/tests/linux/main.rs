//! The proxy with a Linux kernel as its guest. Requires root and /dev/net/tun.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod datagrams;
mod dns;
mod names;
mod namespace;
mod policy;
mod published;
mod servers;
mod slow;
mod tap;
mod tcp;
mod thaw;
mod throughput;
mod world;
