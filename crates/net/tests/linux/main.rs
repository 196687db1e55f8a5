//! The proxy with a Linux kernel as its guest.

mod tcp;
mod world;
