//! The floor: the cost of touching guest memory without any other work.
//!
//! A vCPU in ring 3 runs a loop of four instructions that touches one word of every page of a
//! range, and ends with a store that exits. There is no monitor around it: one VM, one vCPU, two
//! memory slots. A plan provides the guest memory, so that the loop and a thawed guest touch the
//! same backing. The difference between the replay and the loop is the overhead of the instrument.

mod compare;
mod config;
mod guest;

pub use compare::{CompareError, FloorResults};
pub use config::{FloorConfig, FloorLeaves, RunFloorError};

use std::path::Path;
use std::time::Instant;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_userspace_memory_region};
use kvm_ioctls::VcpuExit;
use thiserror::Error;
use vm_memory::GuestMemoryError;

use firn_base::{GuestRange, PAGE_SIZE as PAGE};
use firn_memory::{AnonymousError, GuestMemory, Leaf};
use firn_snapshot::{LayoutError, MemoryLayout, MemoryRegion};
use firn_vmm::{KVM_DEVICE, KvmCounters, KvmError, KvmStats, open_kvm};

/// How the loop touches a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloorAccess {
    /// Reads a word.
    Read,
    /// Reads, increments and writes a word.
    Write,
}

/// One run of the loop.
#[derive(Clone, Copy, Debug)]
struct FloorRun {
    /// Pages touched.
    pages: u64,
    /// From the start of `KVM_RUN` to the store that ended it, in ns.
    ns: u64,
    /// KVM's counters.
    kvm: KvmStats,
}

/// Why the loop failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FloorError {
    /// The range is not in one region of guest memory, or is not a multiple of the leaf size.
    #[error(
        "the loop cannot touch guest memory {range} through leaves of {leaf}: the range must lie in one region, and its \
         ends must be multiples of the leaf size"
    )]
    Range {
        /// The range.
        range: GuestRange,
        /// The guest's leaves.
        leaf: Leaf,
    },
    /// KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM returned an error.
    #[error("KVM cannot {operation}")]
    Refused {
        /// The operation.
        operation: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// There are no guest-physical addresses above guest memory.
    #[error("no guest-physical addresses are left for the loop's page tables")]
    Places(#[from] LayoutError),
    /// The memory for the loop and its page tables cannot be allocated.
    #[error("cannot allocate memory for the loop's page tables")]
    Control(#[from] AnonymousError),
    /// Code and page tables cannot be written.
    #[error("cannot write the loop and its page tables")]
    Load(#[source] GuestMemoryError),
    /// The loop did not end with its store.
    #[error("the loop ended in {0} instead of its last store")]
    Exit(String),
    /// KVM's counters cannot be read.
    #[error("cannot read KVM's counters")]
    Counters(#[source] std::io::Error),
}

fn refused(operation: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> FloorError {
    move |source| FloorError::Refused { operation, source }
}

/// Touches one word of every page of a range of guest memory, in ascending order, through guest
/// leaves of 4 KiB or 2 MiB, and measures the time. Also returns the sum of the words that it read;
/// 0 for writes.
fn run(
    memory: &GuestMemory,
    range: GuestRange,
    access: FloorAccess,
    leaf: Leaf,
) -> Result<(FloorRun, u64), FloorError> {
    let fits = range.len > 0
        && leaf != Leaf::Size1G
        && range.start.is_multiple_of(leaf.bytes())
        && range.len.is_multiple_of(leaf.bytes())
        && memory.layout().regions().any(|region| {
            range.start >= region.guest_range().start && range.end() <= region.guest_range().end
        });
    if !fits {
        return Err(FloorError::Range { range, leaf });
    }
    let end = memory.layout().regions().map(|region| region.guest_range().end).max().unwrap_or(0);
    let control_at = end.next_multiple_of(1 << 30) + (1 << 30);
    let places = guest::Places { control: control_at, report: control_at - PAGE };
    let control_layout = MemoryLayout::new(vec![MemoryRegion {
        guest_addr: places.control,
        len: guest::control_bytes(range),
    }])?;
    let control = GuestMemory::anonymous(control_layout)?;
    let registers =
        guest::load(&control.vm_memory(), places, range, access, leaf).map_err(FloorError::Load)?;

    let kvm = open_kvm(Path::new(KVM_DEVICE))?;
    let vm = kvm.create_vm().map_err(refused("create a VM"))?;
    for (number, slot) in (0..).zip(memory.slots().iter().chain(control.slots())) {
        let region = kvm_userspace_memory_region {
            slot: number,
            flags: 0,
            guest_phys_addr: slot.guest_addr,
            memory_size: slot.len,
            userspace_addr: slot.host_addr,
        };
        // SAFETY: the memory stays mapped while `memory` and `control` live, which is longer than
        // the VM.
        unsafe { vm.set_user_memory_region(region) }.map_err(refused("add a memory slot"))?;
    }
    let mut vcpu = vm.create_vcpu(0).map_err(refused("create a vCPU"))?;
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(refused("list the CPUID that it supports"))?;
    vcpu.set_cpuid2(&cpuid).map_err(refused("set CPUID"))?;
    let mut sregs = vcpu.get_sregs().map_err(refused("read special registers"))?;
    guest::set_ring3(&mut sregs, places);
    vcpu.set_sregs(&sregs).map_err(refused("set special registers"))?;
    vcpu.set_regs(&registers).map_err(refused("set registers"))?;

    let counters = KvmCounters::open(&[&vm, &vcpu]).map_err(FloorError::Counters)?;

    let begun = Instant::now();
    let exit = vcpu.run().map_err(refused("run the loop"))?;
    let elapsed = begun.elapsed();
    let sum = match exit {
        VcpuExit::MmioWrite(at, data) if at == places.report => data
            .try_into()
            .map(u64::from_le_bytes)
            .map_err(|_| FloorError::Exit(format!("a store of {} bytes", data.len())))?,
        other => return Err(FloorError::Exit(format!("{other:?}"))),
    };
    let run = FloorRun {
        pages: range.len / PAGE,
        ns: firn_base::nanoseconds(elapsed),
        kvm: counters.read().map_err(FloorError::Counters)?,
    };
    Ok((run, sum))
}

#[cfg(test)]
mod tests;
