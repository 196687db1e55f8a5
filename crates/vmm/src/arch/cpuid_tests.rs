use super::*;

fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 { function, index, ..Default::default() }
}

#[test]
fn neighbours_are_the_threads_of_a_core() {
    let leaves = [(1, 0), (0xb, 0), (0xb, 1), (0x1f, 0), (0x8000_0008, 0), (0x8000_001e, 0)];
    let entries: Vec<_> = leaves.map(|(function, index)| entry(function, index)).into();
    let supported = CpuId::from_entries(&entries).unwrap();
    for id in 0..6 {
        let mut cpuid = for_vcpu(&supported, CpuModel::Host, id, 6, true);
        pair_threads(&mut cpuid, id, 6);
        let find = |leaf, index| *find(cpuid.as_slice(), leaf, index).unwrap();
        let id = u32::from(id);
        assert_eq!(find(1, 0).ebx, (id << 24) | (6 << 16) | (8 << 8));
        assert_ne!(find(1, 0).edx & HTT, 0);
        for leaf in [0xb, 0x1f] {
            let threads = find(leaf, 0);
            assert_eq!((threads.eax, threads.ebx, threads.ecx, threads.edx), (1, 2, 0x100, id));
        }
        let cores = find(0xb, 1);
        assert_eq!((cores.eax, cores.ebx, cores.ecx, cores.edx), (3, 6, 0x201, id));
        assert_eq!(find(0x8000_0008, 0).ecx, 5 | (3 << 12));
        let amd = find(0x8000_001e, 0);
        assert_eq!((amd.eax, amd.ebx), (id, (id / 2) | (1 << 8)));
    }
}
