//! The part of sealed guest memory that is copied before the guest starts.
//!
//! KVM itself writes some pages of a guest and reports no error if it cannot: its clocks, steal
//! time, the flags of asynchronous faults and of interrupts. Other pages are written so certainly
//! that waiting for the fault costs time: page tables, which nested paging walks for writing,
//! stacks, descriptor tables, the rings of virtio queues. The guest chooses all these addresses, so
//! their number is bounded, and addresses outside guest memory are skipped.

use firn_base::GuestRange;
use firn_memory::{CopyChunkError, GuestView};
use kvm_bindings::kvm_msr_entry;

use super::write_faults::physical;
use crate::access::{PageTables, PhysicalMemory, Registers, accessed_by_delivery};
use crate::virtio::TransportState;

/// Most page tables of one vCPU that are copied: those of 64 GiB at 4 KiB. The others are copied
/// when they are written.
const MAX_TABLES: usize = 1 << 15;
/// Longest structure that KVM keeps in guest memory, bytes: those of steal time and asynchronous
/// faults.
const KVM_STRUCTURE: u64 = 64;

/// The MSRs that hold an address which KVM writes to (`Documentation/virt/kvm/x86/msr.rst`): index,
/// the bits that are not part of the address, and the bit that enables the writes.
const KVM_PAGES: [(u32, u64, u64); 7] = [
    // MSR_KVM_WALL_CLOCK, its new number, MSR_KVM_SYSTEM_TIME, its new number
    (0x11, 3, 0),
    (0x4b56_4d00, 3, 0),
    (0x12, 3, 1),
    (0x4b56_4d01, 3, 1),
    // MSR_KVM_ASYNC_PF_EN, MSR_KVM_STEAL_TIME, MSR_KVM_PV_EOI_EN
    (0x4b56_4d02, 63, 1),
    (0x4b56_4d03, 63, 1),
    (0x4b56_4d04, 3, 1),
];

/// Copies what a vCPU's registers and MSRs lead to.
pub(crate) fn copy_for_vcpu(
    memory: &GuestView,
    registers: &Registers,
    msrs: &[kvm_msr_entry],
) -> Result<(), CopyChunkError> {
    if !memory.is_sealed() {
        return Ok(());
    }
    for start in msrs.iter().filter_map(kvm_page) {
        memory.make_writable(GuestRange { start, len: KVM_STRUCTURE })?;
    }
    let Some(tables) = PageTables::of(&registers.1) else { return Ok(()) };
    let mut pages = tables.reachable(MAX_TABLES, |table| memory.read(table));
    pages.extend(physical(accessed_by_delivery(registers, tables, memory), tables, memory));
    pages
        .into_iter()
        .try_for_each(|start| memory.make_writable(GuestRange { start, len: 1 }).map(drop))
}

/// Copies the rings of devices. Buffers are copied when a device fills them.
pub(crate) fn copy_for_devices<'a>(
    memory: &GuestView,
    devices: impl Iterator<Item = &'a TransportState>,
) -> Result<(), CopyChunkError> {
    for queue in devices.flat_map(|device| &device.queues).filter(|queue| queue.ready) {
        // virtio 1.2, 2.7: bytes of the three parts, event indices included.
        let size = u64::from(queue.size);
        for (start, len) in [
            (queue.desc_table, 16 * size),
            (queue.avail_ring, 6 + 2 * size),
            (queue.used_ring, 6 + 8 * size),
        ] {
            memory.make_writable(GuestRange { start, len })?;
        }
    }
    Ok(())
}

/// The address at which KVM writes because of an MSR, if it does.
fn kvm_page(msr: &kvm_msr_entry) -> Option<u64> {
    let (_, flags, enabled) = KVM_PAGES.into_iter().find(|(index, ..)| *index == msr.index)?;
    let address = msr.data & !flags;
    (msr.data & enabled == enabled && address != 0).then_some(address)
}
