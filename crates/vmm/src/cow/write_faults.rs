//! Guest writes to sealed memory.
//!
//! KVM has the memory in read-write slots, while the host mapping is read-only. A guest write
//! therefore ends `KVM_RUN` in `EFAULT` with the instruction not executed. The monitor copies the
//! chunk that is written and runs the vCPU again.
//!
//! Since Linux 6.8 KVM reports the faulting page. Otherwise the page is searched for in this order:
//! the operands that the next instruction writes, the page tables on the way to what it accesses
//! (nested paging walks them for writing), then stack and descriptor tables, which the delivery of
//! an interrupt writes. A store that KVM emulates ends like one to an address without memory.
//!
//! Other vCPUs keep running: the bytes of a chunk do not change before the copy, and no vCPU can
//! write to the chunk until the copy is in place.

use firn_base::GuestRange;
use firn_memory::{CopyChunkError, GuestView};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use crate::access::{
    PageTables, PhysicalMemory, Registers, WalkEnd, accessed_by_delivery, accessed_by_instruction,
    written_by_instruction,
};

/// Why a guest write to sealed memory cannot be resolved.
#[derive(Debug)]
pub(crate) enum WriteFaultError {
    /// The vCPU's registers cannot be read.
    Registers(kvm_ioctls::Error),
    /// A chunk cannot be copied.
    Copy {
        /// Guest instruction pointer; 0 when unknown.
        rip: u64,
        source: CopyChunkError,
    },
    /// Nothing that the vCPU writes is sealed.
    NotFound {
        /// Guest instruction pointer.
        rip: u64,
        /// The bytes there, as far as they can be read.
        code: Vec<u8>,
    },
}

/// A vCPU's view of guest memory, which may be sealed.
pub(crate) struct CowMemory {
    memory: GuestView,
    /// The last fault for which no sealed chunk was found: the instruction pointer, and the number
    /// of chunks that were copied by then.
    unresolved: Option<(u64, u64)>,
}

impl CowMemory {
    pub(crate) fn new(memory: GuestView) -> Self {
        Self { memory, unresolved: None }
    }

    /// Whether a failed access to guest memory may be a write to a sealed chunk.
    pub(crate) fn is_sealed(&self) -> bool {
        self.memory.is_sealed()
    }

    /// Performs a guest write that KVM could not perform itself; `false` if `address` is not in
    /// sealed memory.
    pub(crate) fn write(&self, address: u64, data: &[u8]) -> Result<bool, WriteFaultError> {
        let place = GuestAddress(address);
        if !self.is_sealed()
            || !GuestMemory::check_range(&self.memory, place, data.len(), Permissions::Write)
        {
            return Ok(false);
        }
        self.memory.count_write_fault();
        let last = address + (data.len() as u64).saturating_sub(1);
        self.copy(&[address, last]).map_err(|source| WriteFaultError::Copy { rip: 0, source })?;
        // The range is checked above.
        Ok(self.memory.write_slice(data, place).is_ok())
    }

    /// Makes the write possible that ended `KVM_RUN`. `address` is the faulting address, if KVM
    /// reported it.
    pub(crate) fn resolve(
        &mut self,
        fd: &VcpuFd,
        address: Option<u64>,
    ) -> Result<(), WriteFaultError> {
        self.memory.count_write_fault();
        let regs = fd.get_regs().map_err(WriteFaultError::Registers)?;
        let sregs = fd.get_sregs().map_err(WriteFaultError::Registers)?;
        let registers: Registers = (regs, sregs);
        let rip = regs.rip;
        let failed = |source| WriteFaultError::Copy { rip, source };
        if let Some(address) = address
            && self.copy(&[address]).map_err(failed)?
        {
            return Ok(());
        }
        let mut code = Vec::new();
        if let Some(tables) = PageTables::of(&registers.1) {
            code = self.memory.code(rip, tables);
            for find in [operands, page_tables, delivery] {
                if self.copy(&find(&registers, tables, &self.memory)).map_err(failed)? {
                    return Ok(());
                }
            }
        }
        // Another vCPU may have copied the chunk meanwhile, so the instruction is retried once for
        // each number of copies.
        let fault = Some((rip, self.memory.chunk_copies().chunks));
        if self.unresolved == fault {
            return Err(WriteFaultError::NotFound { rip, code });
        }
        self.unresolved = fault;
        Ok(())
    }

    /// Copies the sealed chunks at guest-physical addresses; returns whether there were any.
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
    physical(written_by_instruction(registers, tables, memory), tables, memory)
}

/// The page tables on the way to what the next instruction accesses.
fn page_tables(registers: &Registers, tables: PageTables, memory: &GuestView) -> Vec<u64> {
    walked(accessed_by_instruction(registers, tables, memory), tables, memory)
}

/// What the delivery of an interrupt writes, and the page tables on the way to it.
fn delivery(registers: &Registers, tables: PageTables, memory: &GuestView) -> Vec<u64> {
    let addresses = accessed_by_delivery(registers, tables, memory);
    let mut found = walked(addresses.clone(), tables, memory);
    found.extend(physical(addresses, tables, memory));
    found
}

/// The guest-physical addresses of linear addresses.
pub(super) fn physical(addresses: Vec<u64>, tables: PageTables, memory: &GuestView) -> Vec<u64> {
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
