//! Writes to sealed guest memory, which is mapped for reading alone.
//!
//! KVM has the memory in slots for reading and writing. A write of the guest's ends `KVM_RUN` in `EFAULT`, the instruction not
//! executed: the monitor copies the chunk that is written and runs the vCPU again. From 6.8 on KVM says which page it
//! could not have; else it is among what the instruction at the vCPU's instruction pointer writes, or, where none of that
//! is sealed, among what the processor writes by itself: page tables on its way (nested paging walks them for writing),
//! stack, descriptor tables. A store that KVM emulates ends as one to an address without memory.
//!
//! No other vCPU has to stop: a chunk's bytes do not change before it is copied, and until the copy is in its place
//! nobody can write to it.

use firn_memory::{CopyChunkError, GuestRange, GuestView};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use super::VcpuFailure;
use crate::paging::{PageTables, WalkEnd};
use crate::touches::{Physical, Registers, of_delivery, of_instruction, written};

/// A vCPU's guest memory, which may be sealed.
pub(crate) struct SealedMemory {
    memory: GuestView,
    /// Where nothing was found to copy the last time, and how much had been copied by then.
    stuck: Option<(u64, u64)>,
}

impl Physical for GuestView {
    fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read_slice(&mut bytes, GuestAddress(address)).ok()?;
        Some(bytes)
    }
}

impl SealedMemory {
    pub(crate) fn new(memory: GuestView) -> Self {
        Self { memory, stuck: None }
    }

    /// Whether a failing access to guest memory may be a write to a sealed chunk.
    pub(super) fn is_sealed(&self) -> bool {
        self.memory.is_sealed()
    }

    /// Carries out a write of the guest's to an address that KVM could not write to itself; `false` where it is none of
    /// sealed memory.
    pub(super) fn write(&self, vcpu: u8, address: u64, data: &[u8]) -> Result<bool, VcpuFailure> {
        let place = GuestAddress(address);
        if !self.is_sealed()
            || !GuestMemory::check_range(&self.memory, place, data.len(), Permissions::Write)
        {
            return Ok(false);
        }
        self.memory.count_write_fault();
        let failed = |source| VcpuFailure::Copy { vcpu, rip: 0, source };
        self.copy(&[address, address + (data.len() as u64).saturating_sub(1)]).map_err(failed)?;
        // The range was checked.
        Ok(self.memory.write_slice(data, place).is_ok())
    }

    /// Makes way for the write that ended `KVM_RUN`: at `address`, where KVM says it.
    pub(super) fn resolve(
        &mut self,
        vcpu: u8,
        fd: &VcpuFd,
        address: Option<u64>,
    ) -> Result<(), VcpuFailure> {
        self.memory.count_write_fault();
        let registers: Registers = match (fd.get_regs(), fd.get_sregs()) {
            (Ok(regs), Ok(sregs)) => (regs, sregs),
            (Err(source), _) | (_, Err(source)) => {
                return Err(VcpuFailure::Run { vcpu, rip: 0, source });
            }
        };
        let rip = registers.0.rip;
        let failed = |source| VcpuFailure::Copy { vcpu, rip, source };
        if let Some(address) = address
            && self.copy(&[address]).map_err(failed)?
        {
            return Ok(());
        }
        let mut code = Vec::new();
        if let Some(tables) = PageTables::of(&registers.1) {
            code = self.memory.code(rip, tables);
            for find in [operands, walks, delivery] {
                if self.copy(&find(&registers, tables, &self.memory)).map_err(failed)? {
                    return Ok(());
                }
            }
        }
        // Another vCPU may have copied it in the meantime: once more, unless nothing was copied since the last time here.
        let stuck = Some((rip, self.memory.chunk_copies().chunks));
        if self.stuck == stuck {
            return Err(VcpuFailure::Sealed { vcpu, rip, code });
        }
        self.stuck = stuck;
        Ok(())
    }

    /// Copies the chunks at guest-physical addresses that are sealed; whether there were any.
    fn copy(&self, addresses: &[u64]) -> Result<bool, CopyChunkError> {
        let mut copied = 0;
        for start in addresses {
            copied += self.memory.make_writable(GuestRange { start: *start, len: 1 })?;
        }
        Ok(copied > 0)
    }
}

/// What the next instruction writes.
fn operands(registers: &Registers, tables: PageTables, memory: &GuestView) -> Vec<u64> {
    mapped(written(registers, tables, memory), tables, memory)
}

/// The page tables on the way to all that the next instruction touches.
fn walks(registers: &Registers, tables: PageTables, memory: &GuestView) -> Vec<u64> {
    walked(of_instruction(registers, tables, memory), tables, memory)
}

/// What the delivery of an interrupt writes, and the page tables on the way to it.
fn delivery(registers: &Registers, tables: PageTables, memory: &GuestView) -> Vec<u64> {
    let addresses = of_delivery(registers, tables, memory);
    let mut found = walked(addresses.clone(), tables, memory);
    found.extend(mapped(addresses, tables, memory));
    found
}

/// Where linear addresses are in guest-physical memory.
fn mapped(addresses: Vec<u64>, tables: PageTables, memory: &GuestView) -> Vec<u64> {
    let physical = |linear| match tables.walk(linear, |at| memory.entry(at)).end {
        WalkEnd::Mapped { address, .. } => Some(address),
        WalkEnd::NotPresent | WalkEnd::Unread => None,
    };
    addresses.into_iter().filter_map(physical).collect()
}

/// The page tables on the way to linear addresses.
fn walked(addresses: Vec<u64>, tables: PageTables, memory: &GuestView) -> Vec<u64> {
    let tables = |linear| tables.walk(linear, |at| memory.entry(at)).tables().to_vec();
    addresses.into_iter().flat_map(tables).collect()
}
