//! The CPUID that a guest sees: the intersection of `KVM_GET_SUPPORTED_CPUID` and its processor
//! model, plus values that depend on the vCPU.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

use super::cpu_features::{LEAF_EXTENDED, LEAF_FEATURES, find};
use super::cpu_model::CpuModel;

const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_AMD_SIZES: u32 = 0x8000_0008;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;

/// CPUID.1:ECX, "running under a hypervisor".
const HYPERVISOR: u32 = 1 << 31;
/// CPUID.1:ECX, time-stamp-counter deadline timer, which KVM reports as a capability.
const TSC_DEADLINE: u32 = 1 << 24;
/// CPUID.1:EDX, more than one logical processor.
const HTT: u32 = 1 << 28;
/// Types of a level of leaf 0xb, in ECX.
const THREADS: u32 = 1 << 8;
const CORES: u32 = 2 << 8;
/// CPUID.80000001:ECX, SVM: nested guests are not part of a snapshot.
const SVM: u32 = 1 << 2;
/// CPUID.1:ECX, VMX: nested guests are not part of a snapshot.
const VMX: u32 = 1 << 5;

/// The CPUID of vCPU `id` of `vcpus`, from the features that KVM supports on this host and `model`
/// has.
pub(crate) fn for_vcpu(
    supported: &CpuId,
    model: CpuModel,
    id: u8,
    vcpus: u8,
    tsc_deadline: bool,
) -> CpuId {
    let mut cpuid = supported.clone();
    model.mask(cpuid.as_mut_slice());
    let apic_id = u32::from(id);
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            LEAF_FEATURES => {
                // EBX: initial APIC id, addressable ids in the package, CLFLUSH line (8 * 8 bytes).
                entry.ebx = (apic_id << 24) | (u32::from(vcpus) << 16) | (8 << 8);
                entry.ecx |= HYPERVISOR;
                entry.ecx &= !VMX;
                if tsc_deadline {
                    entry.ecx |= TSC_DEADLINE;
                }
            }
            LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2 => entry.edx = apic_id,
            LEAF_EXTENDED => entry.ecx &= !SVM,
            LEAF_AMD_TOPOLOGY => {
                entry.eax = apic_id;
                entry.ebx = apic_id;
                entry.ecx = 0;
            }
            _ => {}
        }
    }
    cpuid
}

/// Makes neighbours among `vcpus` vCPUs the two threads of a core in the CPUID of vCPU `id`
/// (Intel's Software Developer's Manual 2A, CPUID, leaf 0xb; AMD's manual 3, leaf 0x8000_001e).
pub(crate) fn pair_threads(cpuid: &mut CpuId, id: u8, vcpus: u8) {
    let (id, vcpus) = (u32::from(id), u32::from(vcpus));
    // Bits of an APIC id that select a processor in the package.
    let bits = vcpus.next_power_of_two().trailing_zeros();
    for entry in cpuid.as_mut_slice() {
        match (entry.function, entry.index) {
            (LEAF_FEATURES, _) => entry.edx |= HTT,
            (LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2, 0) => {
                (entry.eax, entry.ebx, entry.ecx) = (1, 2, THREADS);
            }
            (LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2, 1) => {
                (entry.eax, entry.ebx, entry.ecx) = (bits, vcpus, CORES | 1);
            }
            // EBX: core, and threads of a core without the first.
            (LEAF_AMD_TOPOLOGY, _) => entry.ebx = (id / 2) | (1 << 8),
            // ECX: processors of the package without the first, and the bits of their ids.
            (LEAF_AMD_SIZES, _) => entry.ecx = (vcpus - 1) | (bits << 12),
            _ => {}
        }
    }
}

/// The vendor's name and the readable name of the processor, as CPUID spells them.
pub(crate) fn vendor_and_brand(cpuid: &[kvm_cpuid_entry2]) -> (String, String) {
    let vendor =
        find(cpuid, 0, 0).map(|entry| text(&[entry.ebx, entry.edx, entry.ecx])).unwrap_or_default();
    let brand: Vec<u32> = (0x8000_0002..=0x8000_0004)
        .filter_map(|leaf| find(cpuid, leaf, 0))
        .flat_map(|entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
        .collect();
    (vendor, text(&brand))
}

fn text(words: &[u32]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    String::from_utf8_lossy(&bytes).trim_matches(['\0', ' ']).to_owned()
}

#[cfg(test)]
#[path = "cpuid_tests.rs"]
mod tests;
