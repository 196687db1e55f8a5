//! What of sealed guest memory is copied before the guest starts.
//!
//! KVM writes some pages of a guest by itself, and tells nobody when it cannot: its clocks, steal time, the flags of
//! asynchronous faults and of interrupts. Others are written so surely that waiting for the fault is a waste: page tables,
//! which nested paging walks for writing, stacks, descriptor tables, the rings of virtio queues. All of it is the guest's
//! word, so it is bounded, and what is not memory is left out.

use firn_memory::{CopyChunkError, GuestRange, GuestView};
use kvm_bindings::kvm_msr_entry;

use crate::paging::{PageTables, WalkEnd};
use crate::touches::{Physical, Registers, of_delivery};
use crate::virtio::TransportState;

/// Page tables of one vCPU that are looked for: those of 64 GiB at 4 KiB. Others are copied when they are written.
const MOST_TABLES: usize = 1 << 15;
/// Longest structure that KVM keeps in guest memory, bytes: those of steal time and asynchronous faults.
const KVM_STRUCTURE: u64 = 64;

/// `Documentation/virt/kvm/x86/msr.rst`: the MSRs that hold an address which KVM writes to, the bits that are no part of
/// it, and the one that says that it does.
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

/// Copies what a vCPU's registers lead to.
pub(crate) fn copy_of_vcpu(
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
    let mut pages = tables.reachable(MOST_TABLES, |table| memory.read(table));
    let written = of_delivery(registers, tables, memory);
    pages.extend(written.into_iter().filter_map(|linear| {
        match tables.walk(linear, |at| memory.entry(at)).end {
            WalkEnd::Mapped { address, .. } => Some(address),
            WalkEnd::NotPresent | WalkEnd::Unread => None,
        }
    }));
    pages
        .into_iter()
        .try_for_each(|start| memory.make_writable(GuestRange { start, len: 1 }).map(drop))
}

/// Copies the rings of devices. Buffers are copied when a device fills them.
pub(crate) fn copy_of_devices(
    memory: &GuestView,
    devices: &[TransportState],
) -> Result<(), CopyChunkError> {
    for queue in devices.iter().flat_map(|device| &device.queues).filter(|queue| queue.ready) {
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
    let (_, others, enabled) = KVM_PAGES.into_iter().find(|(index, ..)| *index == msr.index)?;
    let address = msr.data & !others;
    (msr.data & enabled == enabled && address != 0).then_some(address)
}
