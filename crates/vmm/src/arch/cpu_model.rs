//! Named processor models: the instructions that a guest sees, independent of the host's other
//! ones.
//!
//! The levels are those of the x86-64 psABI (section 3.1.1, micro-architecture levels). A guest of
//! a named model sees the same instructions on every host that offers the model, so its programs
//! select the same code. Features that only kernels use (paging, time, interrupts, speculation
//! controls) are those of the host: they do not change a program's results.

use std::fmt;
use std::str::FromStr;

use firn_snapshot::{CpuFeatures, CpuidRegister};
use kvm_bindings::kvm_cpuid_entry2;

use super::cpu_features::{
    LEAF_EXTENDED, LEAF_FEATURES, LEAF_SIZES, LEAF_STRUCTURED, LEAF_XSAVE, find, missing,
};

/// A processor model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CpuModel {
    /// Every feature that this host's KVM offers.
    Host,
    /// The psABI's x86-64-v2: SSE 4.2, POPCNT.
    V2,
    /// The psABI's x86-64-v3: AVX2, BMI, FMA; also AES, PCLMULQDQ and RDRAND, which all such
    /// processors have.
    V3,
    /// The psABI's x86-64-v4: v3, and AVX-512 with BW, CD, DQ and VL.
    V4,
}

/// The text is not the name of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a processor model: use host, x86-64-v2, x86-64-v3 or x86-64-v4")]
pub struct CpuModelError(String);

const NAMES: [(CpuModel, &str); 4] = [
    (CpuModel::Host, "host"),
    (CpuModel::V2, "x86-64-v2"),
    (CpuModel::V3, "x86-64-v3"),
    (CpuModel::V4, "x86-64-v4"),
];

impl fmt::Display for CpuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(model, _)| model == self).map(|(_, name)| *name);
        f.write_str(name.unwrap_or_default())
    }
}

impl FromStr for CpuModel {
    type Err = CpuModelError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(model, _)| *model).ok_or_else(|| CpuModelError(text.to_owned()))
    }
}

/// The models' bits of one CPUID register.
struct Word {
    leaf: u32,
    subleaf: u32,
    register: CpuidRegister,
    /// Bits that are taken from the host: for kernels only, or present on every x86-64 processor.
    free: u32,
    /// The bits that v2, v3 and v4 each add.
    adds: [u32; 3],
}

const fn bits<const N: usize>(numbers: [u32; N]) -> u32 {
    let mut mask = 0;
    let mut at = 0;
    while at < N {
        mask |= 1 << numbers[at];
        at += 1;
    }
    mask
}

const fn word(leaf: u32, subleaf: u32, register: CpuidRegister, free: u32, adds: [u32; 3]) -> Word {
    Word { leaf, subleaf, register, free, adds }
}

const WORDS: [Word; 10] = [
    // Free: MONITOR, PDCM, PCID, x2APIC, deadline timer, OSXSAVE, hypervisor.
    // v2: SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT.
    // v3: PCLMULQDQ, FMA, MOVBE, AES, XSAVE, AVX, F16C, RDRAND.
    word(
        LEAF_FEATURES,
        0,
        CpuidRegister::Ecx,
        bits([3, 15, 17, 21, 24, 27, 31]),
        [bits([0, 9, 13, 19, 20, 23]), bits([1, 12, 22, 25, 26, 28, 29, 30]), 0],
    ),
    // Free: FSGSBASE, TSC_ADJUST, FDP_EXCPTN_ONLY, SMEP, ERMS, INVPCID, no FPU CS and DS, SMAP,
    // CLFLUSHOPT, CLWB.
    // v3: BMI1, AVX2, BMI2. v4: AVX512F, DQ, CD, BW, VL.
    word(
        LEAF_STRUCTURED,
        0,
        CpuidRegister::Ebx,
        bits([0, 1, 6, 7, 9, 10, 13, 20, 23, 24]),
        [0, bits([3, 5, 8]), bits([16, 17, 28, 30, 31])],
    ),
    // Free: UMIP.
    word(LEAF_STRUCTURED, 0, CpuidRegister::Ecx, bits([2]), [0; 3]),
    // Free: short REP MOVSB, and speculation controls.
    word(LEAF_STRUCTURED, 0, CpuidRegister::Edx, bits([4, 10, 26, 27, 28, 29, 31]), [0; 3]),
    word(LEAF_STRUCTURED, 1, CpuidRegister::Eax, 0, [0; 3]),
    word(LEAF_STRUCTURED, 1, CpuidRegister::Edx, 0, [0; 3]),
    // Components of the XSAVE area. v3: x87, SSE, AVX. v4: the three components of AVX-512.
    word(LEAF_XSAVE, 0, CpuidRegister::Eax, 0, [0, bits([0, 1, 2]), bits([5, 6, 7])]),
    // Free: CMP_LEGACY, EXTAPIC, CR8 by LOCK MOV, OSVW, TOPOEXT, PERFCTR_CORE. v2: LAHF. v3: LZCNT.
    word(
        LEAF_EXTENDED,
        0,
        CpuidRegister::Ecx,
        bits([1, 3, 4, 9, 22, 23]),
        [bits([0]), bits([5]), 0],
    ),
    // Free: all except AMD's MMX extensions and 3DNow.
    word(LEAF_EXTENDED, 0, CpuidRegister::Edx, !bits([22, 30, 31]), [0; 3]),
    // Free: all except CLZERO.
    word(LEAF_SIZES, 0, CpuidRegister::Ebx, !bits([0]), [0; 3]),
];

/// Leaves of features that no model has: processor trace, key locker, AMX, AVX10.
const EXCLUDED_LEAVES: [u32; 5] = [0x14, 0x19, 0x1d, 0x1e, 0x24];

/// Bytes of the XSAVE area with all components of a model: the legacy area and header, then AVX at
/// 576 and AVX-512 up to 2688 (Intel SDM 1, 13.4 and 13.5; AMD uses the same layout).
const fn xsave_bytes(model: CpuModel) -> u32 {
    match model {
        CpuModel::V4 => 2688,
        _ => 832,
    }
}

impl Word {
    /// The bits of this register that `model` requires.
    fn required(&self, model: CpuModel) -> u32 {
        let levels = match model {
            CpuModel::Host => 0,
            CpuModel::V2 => 1,
            CpuModel::V3 => 2,
            CpuModel::V4 => 3,
        };
        self.adds[..levels].iter().fold(0, |mask, bits| mask | bits)
    }
}

impl CpuModel {
    /// The best named model that a host offers; [`CpuModel::Host`] if it offers none.
    pub(crate) fn best(offered: &[kvm_cpuid_entry2]) -> Self {
        let fits = |model: &Self| model.lacking(offered).is_empty();
        [Self::V4, Self::V3, Self::V2].into_iter().find(fits).unwrap_or(Self::Host)
    }

    /// The features of the model that a host does not offer.
    pub(crate) fn lacking(self, offered: &[kvm_cpuid_entry2]) -> Vec<CpuFeatures> {
        let needed: Vec<_> = WORDS
            .iter()
            .map(|word| CpuFeatures {
                leaf: word.leaf,
                subleaf: word.subleaf,
                register: word.register,
                bits: word.required(self),
            })
            .collect();
        missing(&needed, offered)
    }

    /// Clears every feature that the model does not have.
    pub(crate) fn mask(self, cpuid: &mut [kvm_cpuid_entry2]) {
        if self == Self::Host {
            return;
        }
        for entry in &mut *cpuid {
            for word in &WORDS {
                if (entry.function, entry.index) == (word.leaf, word.subleaf) {
                    let allowed = word.free | word.required(self);
                    *match word.register {
                        CpuidRegister::Eax => &mut entry.eax,
                        CpuidRegister::Ebx => &mut entry.ebx,
                        CpuidRegister::Ecx => &mut entry.ecx,
                        CpuidRegister::Edx => &mut entry.edx,
                    } &= allowed;
                }
            }
        }
        let parts = find(cpuid, LEAF_XSAVE, 0).map_or(0, |entry| entry.eax);
        for entry in cpuid {
            let clear = match (entry.function, entry.index) {
                (LEAF_XSAVE, _) if parts == 0 => true,
                (LEAF_XSAVE, 0) => {
                    // KVM computes the size of the enabled components (EBX).
                    entry.ecx = xsave_bytes(self);
                    entry.edx = 0;
                    false
                }
                (LEAF_XSAVE, 1) => {
                    // XSAVEOPT, XSAVEC, XGETBV of 1, XSAVES; no supervisor components.
                    entry.eax &= 0xf;
                    entry.ecx = 0;
                    entry.edx = 0;
                    false
                }
                (LEAF_XSAVE, part) => part >= 32 || parts & (1 << part) == 0,
                (leaf, _) => EXCLUDED_LEAVES.contains(&leaf),
            };
            if clear {
                (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
            }
        }
    }
}

#[cfg(test)]
#[path = "cpu_model_tests.rs"]
mod tests;
