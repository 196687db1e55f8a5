//! The CPUID that a guest sees, and whether a host can still provide it.
//!
//! A guest gets the intersection of `KVM_GET_SUPPORTED_CPUID` and its processor model, plus values that
//! depend on the vCPU. A snapshot contains that list. A host that lacks one of its features must not
//! run the snapshot, because the guest selected its code by these bits.

use firn_snapshot::{CpuFeatures, CpuidRegister};
use kvm_bindings::{CpuId, kvm_cpuid_entry2};

use super::cpu_model::CpuModel;

pub(super) const LEAF_FEATURES: u32 = 0x1;
pub(super) const LEAF_STRUCTURED: u32 = 0x7;
const LEAF_TOPOLOGY: u32 = 0xb;
pub(super) const LEAF_XSAVE: u32 = 0xd;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
pub(super) const LEAF_EXTENDED: u32 = 0x8000_0001;
const LEAF_POWER: u32 = 0x8000_0007;
pub(super) const LEAF_SIZES: u32 = 0x8000_0008;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;
const LEAF_EXTENDED_2: u32 = 0x8000_0021;

/// CPUID.1:ECX, "running under a hypervisor".
const HYPERVISOR: u32 = 1 << 31;
/// CPUID.1:ECX, time-stamp-counter deadline timer, which KVM reports as a capability.
const TSC_DEADLINE: u32 = 1 << 24;
/// CPUID.1:ECX, OSXSAVE: mirrors CR4, so it is not a property of the host.
const OSXSAVE: u32 = 1 << 27;
/// CPUID.7:ECX, OSPKE: mirrors CR4, so it is not a property of the host.
const OSPKE: u32 = 1 << 4;
/// CPUID.80000001:ECX, SVM: nested guests are not part of a snapshot.
const SVM: u32 = 1 << 2;
/// CPUID.1:ECX, VMX: nested guests are not part of a snapshot.
const VMX: u32 = 1 << 5;

/// A register of a CPUID leaf whose bits are features.
struct FeatureWord {
    leaf: u32,
    subleaf: u32,
    register: CpuidRegister,
    /// Bits that are not properties of the host.
    ignored: u32,
}

fn register_of(entry: &kvm_cpuid_entry2, register: CpuidRegister) -> u32 {
    match register {
        CpuidRegister::Eax => entry.eax,
        CpuidRegister::Ebx => entry.ebx,
        CpuidRegister::Ecx => entry.ecx,
        CpuidRegister::Edx => entry.edx,
    }
}

const fn word(leaf: u32, subleaf: u32, register: CpuidRegister, ignored: u32) -> FeatureWord {
    FeatureWord { leaf, subleaf, register, ignored }
}

const FEATURE_WORDS: &[FeatureWord] = &[
    word(LEAF_FEATURES, 0, CpuidRegister::Ecx, OSXSAVE),
    word(LEAF_FEATURES, 0, CpuidRegister::Edx, 0),
    word(LEAF_STRUCTURED, 0, CpuidRegister::Ebx, 0),
    word(LEAF_STRUCTURED, 0, CpuidRegister::Ecx, OSPKE),
    word(LEAF_STRUCTURED, 0, CpuidRegister::Edx, 0),
    word(LEAF_STRUCTURED, 1, CpuidRegister::Eax, 0),
    word(LEAF_STRUCTURED, 1, CpuidRegister::Edx, 0),
    word(LEAF_STRUCTURED, 2, CpuidRegister::Edx, 0),
    word(LEAF_XSAVE, 0, CpuidRegister::Eax, 0),
    word(LEAF_XSAVE, 1, CpuidRegister::Eax, 0),
    word(LEAF_KVM_FEATURES, 0, CpuidRegister::Eax, 0),
    word(LEAF_EXTENDED, 0, CpuidRegister::Ecx, 0),
    word(LEAF_EXTENDED, 0, CpuidRegister::Edx, 0),
    word(LEAF_POWER, 0, CpuidRegister::Edx, 0),
    word(LEAF_SIZES, 0, CpuidRegister::Ebx, 0),
    word(LEAF_EXTENDED_2, 0, CpuidRegister::Eax, 0),
];

/// The CPUID of vCPU `id` of `vcpus`, from the features that KVM supports on this host and `model` has.
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

/// Readable text for several registers.
pub(crate) fn describe_all(features: &[CpuFeatures]) -> String {
    features.iter().map(describe).collect::<Vec<_>>().join(", ")
}

/// Readable text for feature bits.
fn describe(features: &CpuFeatures) -> String {
    let CpuFeatures { leaf, subleaf, register, bits } = features;
    format!("CPUID {leaf:#x}.{subleaf}:{register:?} bits {bits:#010x}")
}

/// The features of a CPUID list: one entry for each feature word that is not zero.
pub(crate) fn features(cpuid: &[kvm_cpuid_entry2]) -> Vec<CpuFeatures> {
    FEATURE_WORDS
        .iter()
        .filter_map(|word| {
            let bits = find(cpuid, word.leaf, word.subleaf)
                .map_or(0, |entry| register_of(entry, word.register) & !word.ignored);
            (bits != 0).then_some(CpuFeatures {
                leaf: word.leaf,
                subleaf: word.subleaf,
                register: word.register,
                bits,
            })
        })
        .collect()
}

/// The features of `needed` that the list `offered` lacks.
pub(crate) fn missing(needed: &[CpuFeatures], offered: &[kvm_cpuid_entry2]) -> Vec<CpuFeatures> {
    needed
        .iter()
        .filter_map(|need| {
            let have = find(offered, need.leaf, need.subleaf)
                .map_or(0, |entry| register_of(entry, need.register));
            let bits = need.bits & !have;
            (bits != 0).then_some(CpuFeatures { bits, ..*need })
        })
        .collect()
}

pub(super) fn find(
    cpuid: &[kvm_cpuid_entry2],
    leaf: u32,
    subleaf: u32,
) -> Option<&kvm_cpuid_entry2> {
    cpuid.iter().find(|entry| entry.function == leaf && entry.index == subleaf)
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
