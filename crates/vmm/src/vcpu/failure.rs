//! Why a vCPU stops for good.

use firn_base::PAGE_SIZE;
use firn_memory::CopyChunkError;
use firn_memory::sigbus::LostBacking;
use thiserror::Error;

use crate::bus::PowerRequest;
use crate::cow::WriteFaultError;

/// Why a vCPU stopped for good.
#[derive(Debug)]
pub(crate) enum VcpuEnd {
    /// The guest requested power-off or a reset.
    Power(PowerRequest),
    /// A triple fault.
    TripleFault,
    /// KVM cannot continue.
    Failure(VcpuFailure),
}

/// Why KVM cannot run a vCPU any further.
#[derive(Debug, Error)]
pub enum VcpuFailure {
    /// `KVM_RUN` failed. `EFAULT` means guest memory that the host cannot provide.
    #[error("vCPU {vcpu} cannot run at instruction {rip:#x}")]
    Run {
        /// Number of the vCPU.
        vcpu: u8,
        /// Guest instruction pointer; 0 when unknown.
        rip: u64,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// The host cannot provide a page of guest memory any more.
    #[error("the host cannot provide {}", page(*address))]
    Memory {
        /// Guest-physical address, if KVM reported it.
        address: Option<u64>,
        /// The memory that the host lost, if known.
        source: Option<LostBacking>,
    },
    /// The guest wrote to sealed memory, and the page that it wrote was not found.
    #[error(
        "cannot resolve a write of vCPU {vcpu} to sealed memory at instruction {rip:#x} (bytes {}): \
         none of what the instruction writes is sealed; use the planner pass, which gives each microVM \
         its own replica",
        hex(code)
    )]
    WriteFault {
        /// Number of the vCPU.
        vcpu: u8,
        /// Guest instruction pointer.
        rip: u64,
        /// The bytes there, as far as they can be read.
        code: Vec<u8>,
    },
    /// The guest wrote to sealed memory, which could not be copied.
    #[error("vCPU {vcpu} cannot write at instruction {rip:#x}")]
    Copy {
        /// Number of the vCPU.
        vcpu: u8,
        /// Guest instruction pointer; 0 when unknown.
        rip: u64,
        /// Why the copy failed.
        source: CopyChunkError,
    },
    /// The processor refused to enter the guest.
    #[error(
        "the processor refuses to enter vCPU {vcpu}, hardware reason {reason:#x}: its state is invalid"
    )]
    Entry {
        /// Number of the vCPU.
        vcpu: u8,
        /// The hardware's reason.
        reason: u64,
    },
    /// KVM cannot emulate an instruction.
    #[error("KVM cannot emulate an instruction of vCPU {vcpu} at {rip:#x}")]
    Internal {
        /// Number of the vCPU.
        vcpu: u8,
        /// Guest instruction pointer; 0 when unknown.
        rip: u64,
    },
    /// An exit that the monitor does not handle.
    #[error("vCPU {vcpu} left guest mode for an unknown reason: {reason}")]
    UnknownExit {
        /// Number of the vCPU.
        vcpu: u8,
        /// KVM's exit, as text.
        reason: String,
    },
}

impl VcpuFailure {
    pub(super) fn of_write_fault(vcpu: u8, error: WriteFaultError) -> Self {
        match error {
            WriteFaultError::Registers(source) => Self::Run { vcpu, rip: 0, source },
            WriteFaultError::Copy { rip, source } => Self::Copy { vcpu, rip, source },
            WriteFaultError::NotFound { rip, code } => Self::WriteFault { vcpu, rip, code },
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    let bytes: Vec<_> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    if bytes.is_empty() { "unreadable".to_owned() } else { bytes.join(" ") }
}

fn page(address: Option<u64>) -> String {
    address.map_or("a page of guest memory".to_owned(), |address| {
        format!("guest page {:#x}", address / PAGE_SIZE)
    })
}
