//! The processor features of a CPUID list, and whether a host has them.
//!
//! A snapshot contains the features of its guest's CPUID. A host that lacks one of them must not
//! run the snapshot, because the guest selected its code by these bits.

use firn_snapshot::{CpuFeatures, CpuidRegister};
use kvm_bindings::kvm_cpuid_entry2;

pub(super) const LEAF_FEATURES: u32 = 0x1;
pub(super) const LEAF_STRUCTURED: u32 = 0x7;
pub(super) const LEAF_XSAVE: u32 = 0xd;
const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
pub(super) const LEAF_EXTENDED: u32 = 0x8000_0001;
const LEAF_POWER: u32 = 0x8000_0007;
pub(super) const LEAF_SIZES: u32 = 0x8000_0008;
const LEAF_EXTENDED_2: u32 = 0x8000_0021;

/// CPUID.1:ECX, OSXSAVE: mirrors CR4, so it is not a property of the host.
const OSXSAVE: u32 = 1 << 27;
/// CPUID.7:ECX, OSPKE: mirrors CR4, so it is not a property of the host.
const OSPKE: u32 = 1 << 4;

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

#[cfg(test)]
#[path = "cpu_features_tests.rs"]
mod tests;
