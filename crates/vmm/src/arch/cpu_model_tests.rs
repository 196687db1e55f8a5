use kvm_bindings::kvm_cpuid_entry2;

use super::super::cpu_features::{
    LEAF_EXTENDED, LEAF_FEATURES, LEAF_SIZES, LEAF_STRUCTURED, LEAF_XSAVE, find,
};
use super::{CpuModel, EXCLUDED_LEAVES, NAMES, WORDS};

/// A processor with every feature bit set, reserved bits included.
fn everything() -> Vec<kvm_cpuid_entry2> {
    let leaf = |function, index| kvm_cpuid_entry2 {
        function,
        index,
        eax: !0,
        ebx: !0,
        ecx: !0,
        edx: !0,
        ..Default::default()
    };
    let mut leaves = vec![
        leaf(0, 0),
        leaf(LEAF_FEATURES, 0),
        leaf(LEAF_STRUCTURED, 0),
        leaf(LEAF_STRUCTURED, 1),
        leaf(LEAF_EXTENDED, 0),
        leaf(LEAF_SIZES, 0),
    ];
    leaves.extend((0..64).map(|part| leaf(LEAF_XSAVE, part)));
    leaves.extend(EXCLUDED_LEAVES.map(|function| leaf(function, 0)));
    leaves
}

fn masked(model: CpuModel) -> Vec<kvm_cpuid_entry2> {
    let mut list = everything();
    model.mask(&mut list);
    list
}

#[test]
fn names_round_trip() {
    for (model, name) in NAMES {
        assert_eq!(model.to_string(), name);
        assert_eq!(name.parse(), Ok(model));
    }
    assert!("x86-64-v5".parse::<CpuModel>().unwrap_err().to_string().contains("x86-64-v5"));
}

#[test]
fn only_the_features_of_the_model_remain() {
    let v3 = masked(CpuModel::V3);
    let features = find(&v3, LEAF_FEATURES, 0).unwrap().ecx;
    let structured = find(&v3, LEAF_STRUCTURED, 0).unwrap();
    for (what, word, bit, there) in [
        ("AVX", features, 28, true),
        ("FMA", features, 12, true),
        ("hypervisor", features, 31, true),
        ("VMX", features, 5, false),
        ("AVX2", structured.ebx, 5, true),
        ("SMEP", structured.ebx, 7, true),
        ("AVX512F", structured.ebx, 16, false),
        ("SHA", structured.ebx, 29, false),
        ("AVX512_VNNI", structured.ecx, 11, false),
        ("AMX", structured.edx, 24, false),
        ("SSE4A", find(&v3, LEAF_EXTENDED, 0).unwrap().ecx, 6, false),
        ("AVX_VNNI", find(&v3, LEAF_STRUCTURED, 1).unwrap().eax, 4, false),
    ] {
        assert_eq!(word >> bit & 1 == 1, there, "{what}");
    }
    assert_eq!(find(&v3, 0, 0).unwrap().ebx, !0, "the vendor comes from the host");
    let v4 = find(&masked(CpuModel::V4), LEAF_STRUCTURED, 0).unwrap().ebx;
    assert_eq!(v4 >> 16 & 1, 1);
}

#[test]
fn the_xsave_area_has_the_components_of_the_model() {
    let parts = |model| {
        let list = masked(model);
        let first = *find(&list, LEAF_XSAVE, 0).unwrap();
        let there: Vec<u32> =
            (2..64).filter(|part| find(&list, LEAF_XSAVE, *part).unwrap().eax != 0).collect();
        (first.eax, first.ecx, there)
    };
    assert_eq!(parts(CpuModel::V2), (0, 0, vec![]));
    assert_eq!(parts(CpuModel::V3), (0b111, 832, vec![2]));
    assert_eq!(parts(CpuModel::V4), (0b1110_0111, 2688, vec![2, 5, 6, 7]));
}

#[test]
fn the_host_model_changes_nothing() {
    assert_eq!(masked(CpuModel::Host), everything());
}

#[test]
fn a_host_offers_exactly_the_models_whose_features_it_has() {
    for model in [CpuModel::V2, CpuModel::V3, CpuModel::V4] {
        let exactly = masked(model);
        assert_eq!(model.lacking(&exactly), vec![]);
        assert_eq!(CpuModel::best(&exactly), model);
    }
    let v2 = masked(CpuModel::V2);
    let lacking = CpuModel::V3.lacking(&v2);
    assert!(lacking.iter().any(|one| one.leaf == LEAF_STRUCTURED && one.bits >> 5 & 1 == 1));
    assert_eq!(CpuModel::best(&[]), CpuModel::Host);
}

#[test]
fn no_bit_is_both_free_and_required() {
    for word in &WORDS {
        assert_eq!(word.free & word.required(CpuModel::V4), 0, "{:#x}", word.leaf);
    }
}
