//! The KVM virtual machine that holds vCPUs, memory slots and interrupt controllers.

use std::sync::Arc;

use kvm_bindings::{
    KVM_CAP_X86_DISABLE_EXITS, KVM_CLOCK_REALTIME, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KVM_MEM_LOG_DIRTY_PAGES, KVM_PIT_SPEAKER_DUMMY,
    KVM_X86_DISABLE_EXITS_HLT, kvm_clock_data, kvm_enable_cap, kvm_irqchip, kvm_pit_config,
    kvm_pit_state2, kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use uuid::Uuid;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};
use vmm_sys_util::eventfd::EventFd;

use firn_memory::{GuestMemory, Slot};
use firn_snapshot::PageSet;

use super::index::{self, KvmIndex};
use super::{FaultHandling, OpenKvm};
use crate::arch::layout;

const IRQCHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// Bit of an I/O APIC redirection entry: the interrupt is masked.
const REDIRECTION_MASKED: u64 = 1 << 16;

/// KVM refused an operation on the virtual machine.
#[derive(Debug, Error)]
#[error("KVM refused to {operation}")]
pub struct VmError {
    operation: &'static str,
    source: kvm_ioctls::Error,
}

fn failed(operation: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> VmError {
    move |source| VmError { operation, source }
}

/// State that belongs to no vCPU and no device: interrupt controllers and the clock.
/// Part of the machine state: a change needs a new machine-state version.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct VmState {
    pub(crate) irqchips: Vec<kvm_irqchip>,
    pub(crate) clock: kvm_clock_data,
}

impl VmState {
    /// Decides whether the clock advances by the time since it was saved, when it is set. Returns
    /// false if it shall, and the wall clock was not saved with it (`KVM_CLOCK_REALTIME`, Linux
    /// Documentation/virt/kvm/api.rst 4.30).
    pub(crate) fn advance_clock(&mut self, advances: bool) -> bool {
        self.clock.flags &= if advances { KVM_CLOCK_REALTIME } else { 0 };
        !advances || self.clock.flags != 0
    }

    /// Whether the guest accepts interrupts at a pin of the I/O APIC. A guest without a handler
    /// must not get the interrupt.
    pub(crate) fn accepts(&self, gsi: u32) -> bool {
        let Some(chip) = self.irqchips.iter().find(|chip| chip.chip_id == KVM_IRQCHIP_IOAPIC)
        else {
            return false;
        };
        // SAFETY: `chip_id` selects this member of the union, and all members are plain data.
        let table = unsafe { chip.chip.ioapic }.redirtbl;
        usize::try_from(gsi).ok().and_then(|pin| table.get(pin)).is_some_and(|entry| {
            // SAFETY: `bits` covers the whole entry, and every value of it is valid.
            unsafe { entry.bits & REDIRECTION_MASKED == 0 }
        })
    }
}

/// A virtual machine and the guest memory of its slots. KVM accesses that memory until the last
/// vCPU is dropped, so the owner drops its vCPUs first.
pub(crate) struct Vm {
    pub(crate) fd: VmFd,
    pub(crate) memory: Arc<GuestMemory>,
}

/// Creates a virtual machine with slots over address space of this process.
///
/// Slots are added before the irqchip: after it, each slot waits for a grace period of the kernel
/// of several milliseconds.
///
/// # Safety
/// While a vCPU of the machine runs, the addresses of `slots` are guest memory.
pub(crate) unsafe fn create_vm(
    kvm: &OpenKvm,
    slots: &[Slot],
    logs_writes: bool,
) -> Result<VmFd, VmError> {
    let fd = kvm.create_machine().map_err(failed("create a virtual machine"))?;
    if kvm.fault_handling == FaultHandling::InVcpuThreads {
        // KVM uses no asynchronous page faults if halts do not exit (kvm_can_do_async_pf).
        let mut halts = kvm_enable_cap { cap: KVM_CAP_X86_DISABLE_EXITS, ..Default::default() };
        halts.args[0] = KVM_X86_DISABLE_EXITS_HLT.into();
        fd.enable_cap(&halts).map_err(failed("let the guest halt without an exit"))?;
    }
    fd.set_tss_address(layout::KVM_TSS).map_err(failed("set the TSS address"))?;
    fd.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(failed("set the identity map address"))?;
    let flags = if logs_writes { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
    for (slot, range) in (0u32..).zip(slots) {
        let region = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: range.guest_addr,
            memory_size: range.len,
            userspace_addr: range.host_addr,
        };
        // SAFETY: the caller keeps the addresses; the slots come from a layout, so they do not
        // overlap.
        unsafe { fd.set_user_memory_region(region) }.map_err(failed("add a memory slot"))?;
    }
    fd.create_irq_chip().map_err(failed("create the interrupt controllers"))?;
    Ok(fd)
}

impl Vm {
    /// Writes the generation id where the guest reads it.
    pub(crate) fn write_generation(&self, generation: Uuid) -> Result<(), GuestMemoryError> {
        let memory = self.memory.vm_memory();
        memory.write_slice(generation.as_bytes(), GuestAddress(layout::GENERATION_ID))
    }

    /// Creates the interval timer of a PC.
    pub(crate) fn create_pit(&self) -> Result<(), VmError> {
        // The guest calibrates with the speaker's port, too.
        let config = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        self.fd.create_pit2(config).map_err(failed("create the interval timer"))
    }

    /// Reads the interval timer, which there is.
    pub(crate) fn save_pit(&self) -> Result<kvm_pit_state2, VmError> {
        self.fd.get_pit2().map_err(failed("read the interval timer"))
    }

    /// Sets the interval timer, which there is.
    pub(crate) fn restore_pit(&self, state: &kvm_pit_state2) -> Result<(), VmError> {
        self.fd.set_pit2(state).map_err(failed("set the interval timer"))
    }

    /// Connects an event to a pin of the I/O APIC.
    pub(crate) fn interrupt(&self, event: &EventFd, gsi: u32) -> Result<(), VmError> {
        self.fd.register_irqfd(event, gsi).map_err(failed("connect an interrupt"))
    }

    /// Signals an event when the guest writes `value` to an address.
    pub(crate) fn notify(
        &self,
        event: &EventFd,
        address: &IoEventAddress,
        value: u32,
    ) -> Result<(), VmError> {
        self.fd
            .register_ioevent(event, address, value)
            .map_err(failed("connect a queue's notification"))
    }

    /// The image pages that the guest, KVM or the monitor wrote since the start; `None` if the
    /// memory does not [track writes](GuestMemory::track_writes). All vCPUs are paused.
    pub(crate) fn written(&self) -> Result<Option<PageSet>, VmError> {
        if self.memory.tracks_writes() {
            self.memory.mark_written(&self.log()?);
        }
        Ok(self.memory.written())
    }

    /// Fills KVM's tables for what the plan indexes. No vCPU runs yet.
    ///
    /// KVM logs a page as dirty when it maps it writable. Pages mapped in advance are not written,
    /// so if the memory tracks writes, the log is cleared afterwards.
    pub(crate) fn fill_index(&self, kvm: &Kvm, vcpu: &VcpuFd) -> Result<KvmIndex, VmError> {
        if !self.memory.tracks_writes() {
            return Ok(index::build(kvm, vcpu, self.memory.indexed()));
        }
        self.memory.mark_written(&self.log()?);
        let index = index::build(kvm, vcpu, self.memory.indexed());
        self.log()?;
        Ok(index)
    }

    /// The image pages that KVM logged as dirty since the last call.
    fn log(&self) -> Result<PageSet, VmError> {
        let layout = self.memory.layout();
        let mut written = PageSet::new(layout.pages());
        for (slot, region) in (0u32..).zip(layout.regions()) {
            let len = usize::try_from(region.len).unwrap_or(usize::MAX);
            let log = self
                .fd
                .get_dirty_log(slot, len)
                .map_err(failed("report the pages that were written"))?;
            let pages = region.image_pages();
            for (word, first) in log.into_iter().zip(pages.clone().step_by(64)) {
                let set = (0..64).filter(|bit| word >> bit & 1 == 1).map(|bit| first + bit);
                set.filter(|page| pages.contains(page)).for_each(|page| written.insert(page));
            }
        }
        Ok(written)
    }

    /// Saves interrupt controllers and clock. All vCPUs are paused.
    pub(crate) fn save(&self) -> Result<VmState, VmError> {
        let mut irqchips = Vec::with_capacity(IRQCHIPS.len());
        for chip_id in IRQCHIPS {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            self.fd.get_irqchip(&mut chip).map_err(failed("read an interrupt controller"))?;
            irqchips.push(chip);
        }
        let clock = self.fd.get_clock().map_err(failed("read the clock"))?;
        Ok(VmState { irqchips, clock })
    }

    /// Restores the interrupt controllers.
    pub(crate) fn restore(&self, state: &VmState) -> Result<(), VmError> {
        for chip in &state.irqchips {
            self.fd.set_irqchip(chip).map_err(failed("set an interrupt controller"))?;
        }
        Ok(())
    }

    /// Sets the clock. The guest's monotonic time continues from the freeze, and its agent sets the
    /// wall clock, unless the clock [advances](VmState::advance_clock).
    pub(crate) fn set_clock(&self, state: &VmState) -> Result<(), VmError> {
        self.fd.set_clock(&state.clock).map_err(failed("set the clock"))
    }
}

#[cfg(test)]
#[path = "vm_tests.rs"]
mod tests;
