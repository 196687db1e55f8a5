//! Where guest memory is mapped in this process.

/// One range of guest memory, as KVM requires it for a memory slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// First guest-physical address, in bytes.
    pub guest_addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Where it is mapped in this process: congruent to `guest_addr` modulo 2 MiB, so that huge
    /// leaves fit.
    pub host_addr: u64,
}

/// The host address of a guest address; `None` where the guest has no memory.
pub(crate) fn host_addr(slots: &[Slot], guest_addr: u64) -> Option<u64> {
    let slot = slots.iter().rev().find(|slot| slot.guest_addr <= guest_addr)?;
    let inside = guest_addr - slot.guest_addr;
    (inside < slot.len).then_some(slot.host_addr + inside)
}
