//! The microVM monitor: KVM, boot, devices, machine state.

pub mod virtio;
