//! The state of a vCPU: saving it, and restoring it in the order of its dependencies.
//!
//! Order of a restore: CPUID, MP state, registers, special registers, XSAVE, XCRs, debug registers,
//! local APIC, then MSRs (the deadline timer's MSR requires the APIC's mode), then events, then the
//! kvmclock notice. `Documentation/virt/kvm/api.rst` describes each call.

use std::ffi::c_char;
use std::ops::Range;

use kvm_bindings::{
    CpuId, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use serde::{Deserialize, Serialize};
use thiserror::Error;

const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;
/// The addresses of kvmclock's page, old and new. Bit 0 enables it.
const MSR_KVM_SYSTEM_TIME: [u32; 2] = [0x12, 0x4b56_4d01];
/// Frequencies that differ by less are measurements of the same clock (parts per million).
const TSC_TOLERANCE_PPM: u64 = 250;

/// One paused vCPU.
/// Part of the machine state: a change needs a new machine-state version.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct VcpuState {
    /// The list that the monitor set. It is not read back from KVM: KVM with software page tables
    /// returns the features of the host.
    pub(crate) cpuid: Vec<kvm_cpuid_entry2>,
    pub(crate) mp_state: kvm_mp_state,
    pub(crate) regs: kvm_regs,
    pub(crate) sregs: kvm_sregs,
    pub(crate) xsave: kvm_xsave,
    pub(crate) xcrs: kvm_xcrs,
    pub(crate) debug_regs: kvm_debugregs,
    pub(crate) lapic: kvm_lapic_state,
    pub(crate) msrs: Vec<kvm_msr_entry>,
    pub(crate) events: kvm_vcpu_events,
    /// Frequency of the guest's time-stamp counter, kHz.
    pub(crate) tsc_khz: u32,
}

/// Why a vCPU's state cannot be saved.
#[derive(Debug, Error)]
pub enum SaveVcpuError {
    /// KVM returns an error for a part.
    #[error("cannot read {part} of vCPU {vcpu}")]
    Get {
        /// Number of the vCPU.
        vcpu: u8,
        /// The part.
        part: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// The extended state is larger than a snapshot supports.
    #[error(
        "the extended state of vCPU {vcpu} has {size} bytes, and a snapshot supports 4096: the guest \
         has a dynamic feature such as AMX"
    )]
    ExtendedState {
        /// Number of the vCPU.
        vcpu: u8,
        /// Bytes that KVM requires.
        size: i32,
    },
    /// The list of MSRs is longer than KVM accepts.
    #[error("the list of MSRs of vCPU {vcpu} is too long")]
    MsrList {
        /// Number of the vCPU.
        vcpu: u8,
    },
}

/// Why a vCPU's state cannot be restored.
#[derive(Debug, Error)]
pub enum RestoreVcpuError {
    /// KVM returns an error for a part.
    #[error("cannot set {part} of vCPU {vcpu}")]
    Set {
        /// Number of the vCPU.
        vcpu: u8,
        /// The part.
        part: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// The CPUID list is longer than KVM accepts.
    #[error("the CPUID list of vCPU {vcpu} has {entries} entries, more than KVM accepts")]
    Cpuid {
        /// Number of the vCPU.
        vcpu: u8,
        /// Entries in the snapshot.
        entries: usize,
    },
    /// This host cannot set an MSR to its value.
    #[error(
        "this host's KVM cannot set MSR {msr:#x} of vCPU {vcpu} to {value:#x}: thaw on a host \
         with the processor and kernel of the freeze"
    )]
    Msr {
        /// Number of the vCPU.
        vcpu: u8,
        /// Index of the MSR.
        msr: u32,
        /// Its value in the snapshot.
        value: u64,
    },
    /// The time-stamp counter would run at another frequency.
    #[error(
        "the snapshot's time-stamp counter runs at {snapshot} kHz, this host's at {host} kHz, \
         and its KVM cannot scale it: thaw on a host with the same frequency"
    )]
    TscFrequency {
        /// kHz at the freeze.
        snapshot: u32,
        /// kHz of this host.
        host: u32,
    },
}

/// The MSRs to save on this host: those of `KVM_GET_MSR_INDEX_LIST`.
pub(crate) fn msr_indices(kvm: &Kvm) -> Result<Vec<u32>, kvm_ioctls::Error> {
    Ok(kvm.get_msr_index_list()?.as_slice().to_vec())
}

/// Saves a vCPU that is out of `KVM_RUN` with every exit completed.
pub(crate) fn save(
    fd: &VcpuFd,
    vcpu: u8,
    cpuid: &CpuId,
    msr_indices: &[u32],
    xsave_size: i32,
) -> Result<VcpuState, SaveVcpuError> {
    let get = |part| move |source| SaveVcpuError::Get { vcpu, part, source };
    if usize::try_from(xsave_size).is_ok_and(|size| size > size_of::<kvm_xsave>()) {
        return Err(SaveVcpuError::ExtendedState { vcpu, size: xsave_size });
    }
    // MP state first: reading it makes KVM process pending INIT and SIPI signals.
    let mp_state = fd.get_mp_state().map_err(get("the MP state"))?;
    let regs = fd.get_regs().map_err(get("the registers"))?;
    let sregs = fd.get_sregs().map_err(get("the special registers"))?;
    let xsave = fd.get_xsave().map_err(get("the extended state"))?;
    let xcrs = fd.get_xcrs().map_err(get("the XCRs"))?;
    let debug_regs = fd.get_debug_regs().map_err(get("the debug registers"))?;
    let lapic = fd.get_lapic().map_err(get("the local APIC"))?;
    let msrs = save_msrs(fd, vcpu, msr_indices)?;
    let events = fd.get_vcpu_events().map_err(get("the pending events"))?;
    let tsc_khz = fd.get_tsc_khz().map_err(get("the TSC frequency"))?;
    Ok(VcpuState {
        cpuid: cpuid.as_slice().to_vec(),
        mp_state,
        regs,
        sregs,
        xsave,
        xcrs,
        debug_regs,
        lapic,
        msrs,
        events,
        tsc_khz,
    })
}

/// Reads all MSRs of `indices` that this vCPU has. KVM stops at the first MSR that it cannot read
/// (some depend on CPUID), so reading continues after that one.
fn save_msrs(fd: &VcpuFd, vcpu: u8, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, SaveVcpuError> {
    let mut saved = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let entries: Vec<kvm_msr_entry> = rest
            .iter()
            .map(|index| kvm_msr_entry { index: *index, ..Default::default() })
            .collect();
        let mut msrs = Msrs::from_entries(&entries).map_err(|_| SaveVcpuError::MsrList { vcpu })?;
        let read = fd.get_msrs(&mut msrs).map_err(|source| SaveVcpuError::Get {
            vcpu,
            part: "the MSRs",
            source,
        })?;
        saved.extend_from_slice(&msrs.as_slice()[..read]);
        rest = rest.get(read + 1..).unwrap_or_default();
    }

    // A deadline of 0 may mean that the timer fired and its interrupt is not delivered yet. An
    // extra interrupt is harmless, a lost one stops the guest.
    let tsc = saved.iter().find(|msr| msr.index == MSR_TSC).map_or(0, |msr| msr.data);
    for msr in saved.iter_mut().filter(|msr| msr.index == MSR_TSC_DEADLINE && msr.data == 0) {
        msr.data = tsc;
    }
    // The deadline is compared with the counter, so the counter is set first.
    saved.sort_by_key(|msr| msr.index == MSR_TSC_DEADLINE);
    Ok(saved)
}

/// The part of a vCPU's state that depends on the moment at which it runs: its time-stamp counter,
/// and the timers that the counter or the bus clock ends. A vCPU that waits for its resume has it
/// set then, so no timer runs meanwhile.
#[derive(Debug)]
pub(crate) struct Timers {
    /// The counter, then the deadline that is compared with it.
    msrs: Vec<kvm_msr_entry>,
    /// The local APIC's count-down, where it counts.
    count: Option<[c_char; APIC_COUNT.end - APIC_COUNT.start]>,
}

/// The registers of a local APIC that have the count-down: its start (TMICT) and what is left of it
/// (TMCCT).
const APIC_COUNT: Range<usize> = 0x380..0x394;

impl Timers {
    /// Takes the timers out of a state that is to be restored.
    pub(crate) fn take(state: &mut VcpuState) -> Self {
        let is_time = |msr: &mut kvm_msr_entry| [MSR_TSC, MSR_TSC_DEADLINE].contains(&msr.index);
        let msrs = state.msrs.extract_if(.., is_time).collect();
        let mut count = [0; APIC_COUNT.end - APIC_COUNT.start];
        count.swap_with_slice(&mut state.lapic.regs[APIC_COUNT]);
        Self { msrs, count: Some(count).filter(|count| count.iter().any(|byte| *byte != 0)) }
    }

    /// Sets them on a vCPU whose other state is restored.
    pub(crate) fn set(&self, fd: &VcpuFd, vcpu: u8) -> Result<(), RestoreVcpuError> {
        let set = |part| move |source| RestoreVcpuError::Set { vcpu, part, source };
        restore_msrs(fd, vcpu, &self.msrs)?;
        if let Some(count) = self.count {
            // Read again: interrupts that the devices raised are in it.
            let mut lapic = fd.get_lapic().map_err(set("the local APIC"))?;
            lapic.regs[APIC_COUNT].copy_from_slice(&count);
            fd.set_lapic(&lapic).map_err(set("the local APIC"))?;
        }
        Ok(())
    }
}

/// The result of restoring a vCPU.
pub(crate) struct RestoredVcpu {
    /// The vCPU's CPUID list.
    pub(crate) cpuid: CpuId,
    /// MSRs that this host cannot set and that already have the right value.
    pub(crate) kept_msrs: Vec<u32>,
}

/// A new vCPU with its CPUID, and the state that it has.
pub(crate) struct Fresh {
    cpuid: CpuId,
    mp_state: kvm_mp_state,
    xcrs: kvm_xcrs,
    debug_regs: kvm_debugregs,
    /// Those that do not change by themselves.
    msrs: Vec<kvm_msr_entry>,
    events: kvm_vcpu_events,
    tsc_khz: u32,
}

impl Fresh {
    /// Sets the CPUID of a new vCPU, and reads the rest.
    pub(crate) fn set_up(kvm: &Kvm, fd: &VcpuFd, cpuid: CpuId) -> Result<Self, kvm_ioctls::Error> {
        fd.set_cpuid2(&cpuid)?;
        // Those that are not known are set.
        let mut msrs = save_msrs(fd, 0, &msr_indices(kvm)?).unwrap_or_default();
        msrs.retain(|msr| ![MSR_TSC, MSR_TSC_DEADLINE].contains(&msr.index));
        Ok(Self {
            cpuid,
            mp_state: fd.get_mp_state()?,
            xcrs: fd.get_xcrs()?,
            debug_regs: fd.get_debug_regs()?,
            msrs,
            events: fd.get_vcpu_events()?,
            tsc_khz: fd.get_tsc_khz()?,
        })
    }
}

/// Restores a saved vCPU. Parts that a `fresh` vCPU has already are not set again.
pub(crate) fn restore(
    kvm: &Kvm,
    fd: &VcpuFd,
    vcpu: u8,
    state: &VcpuState,
    fresh: Option<Fresh>,
) -> Result<RestoredVcpu, RestoreVcpuError> {
    let set = |part| move |source| RestoreVcpuError::Set { vcpu, part, source };
    // A vCPU with another CPUID may have another state.
    let fresh = fresh.filter(|fresh| fresh.cpuid.as_slice() == state.cpuid);
    let cpuid = match &fresh {
        Some(fresh) => fresh.cpuid.clone(),
        None => {
            let cpuid = CpuId::from_entries(&state.cpuid)
                .map_err(|_| RestoreVcpuError::Cpuid { vcpu, entries: state.cpuid.len() })?;
            fd.set_cpuid2(&cpuid).map_err(set("the CPUID"))?;
            cpuid
        }
    };
    let differs =
        |is: fn(&Fresh, &VcpuState) -> bool| fresh.as_ref().is_none_or(|fresh| !is(fresh, state));
    let host_khz = fresh.as_ref().map(|fresh| fresh.tsc_khz);
    restore_tsc_frequency(kvm, fd, vcpu, state.tsc_khz, host_khz)?;
    if differs(|fresh, state| fresh.mp_state == state.mp_state) {
        fd.set_mp_state(state.mp_state).map_err(set("the MP state"))?;
    }
    fd.set_regs(&state.regs).map_err(set("the registers"))?;
    fd.set_sregs(&state.sregs).map_err(set("the special registers"))?;
    // SAFETY: the monitor never enables dynamic features (arch_prctl), and `save` refuses state of
    // more than 4096 bytes, so KVM reads only the struct.
    unsafe { fd.set_xsave(&state.xsave) }.map_err(set("the extended state"))?;
    if differs(|fresh, state| fresh.xcrs == state.xcrs) {
        fd.set_xcrs(&state.xcrs).map_err(set("the XCRs"))?;
    }
    if differs(|fresh, state| fresh.debug_regs == state.debug_regs) {
        fd.set_debug_regs(&state.debug_regs).map_err(set("the debug registers"))?;
    }
    fd.set_lapic(&state.lapic).map_err(set("the local APIC"))?;
    let differs_msr =
        |msr: &&kvm_msr_entry| fresh.as_ref().is_none_or(|fresh| !fresh.msrs.contains(msr));
    let msrs: Vec<_> = state.msrs.iter().filter(differs_msr).copied().collect();
    let kept_msrs = restore_msrs(fd, vcpu, &msrs)?;
    if differs(|fresh, state| fresh.events == state.events) {
        fd.set_vcpu_events(&state.events).map_err(set("the pending events"))?;
    }
    if uses_kvmclock(&state.msrs) {
        fd.kvmclock_ctrl().map_err(set("the kvmclock notice"))?;
    }
    Ok(RestoredVcpu { cpuid, kept_msrs })
}

fn restore_tsc_frequency(
    kvm: &Kvm,
    fd: &VcpuFd,
    vcpu: u8,
    snapshot: u32,
    host: Option<u32>,
) -> Result<(), RestoreVcpuError> {
    let set = |source| RestoreVcpuError::Set { vcpu, part: "the TSC frequency", source };
    let host = host.map_or_else(|| fd.get_tsc_khz().map_err(set), Ok)?;
    let difference = u64::from(snapshot.abs_diff(host));
    if difference * 1_000_000 <= u64::from(host) * TSC_TOLERANCE_PPM {
        return Ok(());
    }
    if !kvm.check_extension(Cap::TscControl) {
        return Err(RestoreVcpuError::TscFrequency { snapshot, host });
    }
    fd.set_tsc_khz(snapshot).map_err(set)
}

/// Whether the guest has kvmclock enabled (`Documentation/virt/kvm/x86/msr.rst`).
fn uses_kvmclock(msrs: &[kvm_msr_entry]) -> bool {
    let clocks = msrs.iter().filter(|msr| MSR_KVM_SYSTEM_TIME.contains(&msr.index));
    clocks.into_iter().any(|msr| msr.data & 1 == 1)
}

fn restore_msrs(
    fd: &VcpuFd,
    vcpu: u8,
    msrs: &[kvm_msr_entry],
) -> Result<Vec<u32>, RestoreVcpuError> {
    let mut kept = Vec::new();
    let mut rest = msrs;
    while !rest.is_empty() {
        let list = Msrs::from_entries(rest).map_err(|_| RestoreVcpuError::Msr {
            vcpu,
            msr: rest[0].index,
            value: rest[0].data,
        })?;
        let set = fd.set_msrs(&list).map_err(|source| RestoreVcpuError::Set {
            vcpu,
            part: "the MSRs",
            source,
        })?;
        if let Some(refused) = rest.get(set) {
            if !has_value(fd, refused) {
                return Err(RestoreVcpuError::Msr {
                    vcpu,
                    msr: refused.index,
                    value: refused.data,
                });
            }
            kept.push(refused.index);
        }
        rest = rest.get(set + 1..).unwrap_or_default();
    }
    Ok(kept)
}

/// Whether the vCPU already has this value, or has no such MSR and the value is the reset value.
fn has_value(fd: &VcpuFd, wanted: &kvm_msr_entry) -> bool {
    let entry = kvm_msr_entry { index: wanted.index, ..Default::default() };
    let Ok(mut list) = Msrs::from_entries(&[entry]) else { return false };
    match fd.get_msrs(&mut list) {
        Ok(1) => list.as_slice()[0].data == wanted.data,
        _ => wanted.data == 0,
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
