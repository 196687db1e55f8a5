use kvm_bindings::kvm_cpuid_entry2;

use firn_snapshot::CpuidRegister;

use super::super::cpuid::vendor_and_brand;
use super::{LEAF_FEATURES, LEAF_STRUCTURED, describe_all, features, missing};

fn entry(function: u32, ebx: u32, ecx: u32, edx: u32) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 { function, ebx, ecx, edx, ..Default::default() }
}

#[test]
fn a_host_may_have_more_features_than_the_guest() {
    let guest = [entry(LEAF_FEATURES, 0, 0b01, 0b11)];
    let host = [entry(LEAF_FEATURES, 0, 0b11, 0b111)];
    assert_eq!(missing(&features(&guest), &host), vec![]);
}

#[test]
fn exactly_the_missing_bits_are_reported() {
    let guest = [entry(LEAF_FEATURES, 0, 0b11, 0), entry(LEAF_STRUCTURED, 0b100, 0, 0)];
    let host = [entry(LEAF_FEATURES, 0, 0b01, 0)];
    let missing = missing(&features(&guest), &host);
    assert_eq!(missing.len(), 2);
    assert_eq!(
        (missing[0].leaf, missing[0].register, missing[0].bits),
        (1, CpuidRegister::Ecx, 0b10)
    );
    assert_eq!(
        (missing[1].leaf, missing[1].register, missing[1].bits),
        (7, CpuidRegister::Ebx, 0b100)
    );
    assert_eq!(describe_all(&missing[1..]), "CPUID 0x7.0:Ebx bits 0x00000004");
}

#[test]
fn the_vendor_has_the_spelling_of_the_processor() {
    let leaf = entry(
        0,
        u32::from_le_bytes(*b"Auth"),
        u32::from_le_bytes(*b"cAMD"),
        u32::from_le_bytes(*b"enti"),
    );
    assert_eq!(vendor_and_brand(&[leaf]).0, "AuthenticAMD");
}
