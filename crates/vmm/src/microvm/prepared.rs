//! A microVM that starts in ring 3, in memory that its caller prepared.
//!
//! Such a guest runs natively on any KVM: on hardware, and with software page tables, where only
//! ring 0 is emulated. It has no operating system, no interrupt handlers and no devices except its
//! caller's register windows.

use kvm_bindings::{
    KVM_MP_STATE_RUNNABLE, kvm_dtable, kvm_mp_state, kvm_regs, kvm_segment, kvm_sregs,
};
use kvm_ioctls::VcpuFd;
use thiserror::Error;

use firn_memory::{CopyChunkError, GuestMemory};

use super::Microvm;
use super::parts::{AssembleError, Machine, Parts};
use crate::arch::cpu_model::CpuModel;
use crate::arch::cpuid;
use crate::config::{HostConfig, SizeError, check_sizes};
use crate::cow::copy_ahead::copy_for_vcpu;
use crate::kvm::OpenKvm;

/// PE, MP, ET, NE, WP, AM, PG.
const CR0: u64 = 0x8005_0033;
/// PAE, and SSE with its exceptions.
const CR4: u64 = 0x620;
/// Long mode, system calls, no-execute.
const EFER: u64 = 0xd01;
/// Interrupts enabled, and the reserved bit that is always set.
const RFLAGS: u64 = 0x202;

/// The initial registers of a vCPU in ring 3, in long mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserRegisters {
    /// Guest-physical address of the top page table. Every level must set the user bit.
    pub page_tables: u64,
    /// Virtual address of the first instruction.
    pub instruction: u64,
    /// The stack pointer.
    pub stack: u64,
    /// RDI, RSI, RDX and RCX: the first arguments of a function.
    pub arguments: [u64; 4],
}

/// One of [`UserRegisters::arguments`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// RDI.
    First,
    /// RSI.
    Second,
    /// RDX.
    Third,
    /// RCX.
    Fourth,
}

/// Why a microVM was not prepared. Everything that the attempt created is removed.
#[derive(Debug, Error)]
pub enum PrepareError {
    /// The sizes are invalid.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// The parts cannot be assembled.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// Sealed memory cannot be copied.
    #[error("cannot copy sealed memory before the start")]
    Copy(#[from] CopyChunkError),
    /// A vCPU cannot be set up.
    #[error("cannot set up vCPU {vcpu}")]
    Vcpu {
        /// Number of the vCPU.
        vcpu: u8,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
}

impl Microvm {
    /// Makes a microVM from memory that contains a program and page tables, with one vCPU for each
    /// set of registers; [`Microvm::resume`] starts it.
    ///
    /// # Errors
    /// See [`PrepareError`].
    pub fn prepare(
        memory: GuestMemory,
        vcpus: &[UserRegisters],
        kvm: OpenKvm,
        host: HostConfig,
    ) -> Result<Self, PrepareError> {
        let count = u8::try_from(vcpus.len()).unwrap_or(u8::MAX);
        check_sizes(count, memory.layout().total_bytes())?;
        let parts = Parts::assemble(host, kvm, memory, count, Machine::default())?;
        let mut cpuids = Vec::with_capacity(vcpus.len());
        for ((vcpu, fd), registers) in (0u8..).zip(&parts.vcpus).zip(vcpus) {
            let list = cpuid::for_vcpu(
                &parts.kvm.cpuid,
                CpuModel::Host,
                vcpu,
                count,
                parts.kvm.has_tsc_deadline(),
            );
            fd.set_cpuid2(&list)
                .and_then(|()| set(fd, registers))
                .map_err(|source| PrepareError::Vcpu { vcpu, source })?;
            let memory = parts.vm.memory.vm_memory();
            if memory.is_sealed() {
                let registers = fd.get_regs().and_then(|regs| Ok((regs, fd.get_sregs()?)));
                let registers = registers.map_err(|source| PrepareError::Vcpu { vcpu, source })?;
                copy_for_vcpu(&memory, &registers, &[])?;
            }
            cpuids.push(list);
        }
        Ok(parts.start(cpuids, None)?)
    }
}

/// Sets the registers of a vCPU.
pub(super) fn set(fd: &VcpuFd, registers: &UserRegisters) -> Result<(), kvm_ioctls::Error> {
    let before = fd.get_sregs()?;
    let data = segment(0x2b, 3, 0);
    fd.set_sregs(&kvm_sregs {
        cr0: CR0,
        cr3: registers.page_tables,
        cr4: CR4,
        efer: EFER,
        cs: segment(0x33, 11, 1),
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        ldt: kvm_segment { unusable: 1, ..Default::default() },
        gdt: kvm_dtable::default(),
        idt: kvm_dtable::default(),
        ..before
    })?;
    let [rdi, rsi, rdx, rcx] = registers.arguments;
    fd.set_regs(&kvm_regs {
        rip: registers.instruction,
        rsp: registers.stack,
        rdi,
        rsi,
        rdx,
        rcx,
        rflags: RFLAGS,
        ..Default::default()
    })?;
    // KVM makes only the first vCPU runnable.
    fd.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE })
}

/// A flat segment of ring 3.
fn segment(selector: u16, type_: u8, long: u8) -> kvm_segment {
    kvm_segment {
        selector,
        limit: 0xffff_ffff,
        type_,
        present: 1,
        dpl: 3,
        s: 1,
        l: long,
        db: 1 - long,
        g: 1,
        ..Default::default()
    }
}
