//! The CPUID that a guest sees: the intersection of `KVM_GET_SUPPORTED_CPUID` and its processor
//! model, plus values that depend on the vCPU.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

use super::cpu_features::{LEAF_EXTENDED, LEAF_FEATURES, find};
use super::cpu_model::CpuModel;

const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;

/// CPUID.1:ECX, "running under a hypervisor".
const HYPERVISOR: u32 = 1 << 31;
/// CPUID.1:ECX, time-stamp-counter deadline timer, which KVM reports as a capability.
const TSC_DEADLINE: u32 = 1 << 24;
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
