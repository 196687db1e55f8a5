use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{Rsdp, layout, write_tables};
use crate::config::MAX_VCPUS;

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |a, b| a.wrapping_add(*b))
}

fn table(memory: &GuestMemoryMmap, address: u64) -> Vec<u8> {
    let length: u32 = memory.read_obj(GuestAddress(address + 4)).unwrap();
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
    bytes
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
}

#[test]
fn tables_are_linked_and_have_correct_checksums() {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
    let rsdp_address = write_tables(&memory, 4, 5, false).unwrap();

    let mut rsdp = vec![0; Rsdp::len()];
    memory.read_slice(&mut rsdp, GuestAddress(rsdp_address)).unwrap();
    assert_eq!(&rsdp[..8], b"RSD PTR ");
    assert_eq!(sum(&rsdp[..20]), 0);
    assert_eq!(sum(&rsdp), 0);

    let xsdt = table(&memory, u64_at(&rsdp, 24));
    assert_eq!(&xsdt[..4], b"XSDT");
    assert_eq!(sum(&xsdt), 0);

    let fadt = table(&memory, u64_at(&xsdt, 36));
    assert_eq!(&fadt[..4], b"FACP");
    assert_eq!(sum(&fadt), 0);
    let madt = table(&memory, u64_at(&xsdt, 44));
    assert_eq!(&madt[..4], b"APIC");
    assert_eq!(sum(&madt), 0);
    // 44 bytes of header, four processors of 8, one I/O APIC of 12.
    assert_eq!(madt.len(), 44 + 4 * 8 + 12);

    let dsdt = table(&memory, u64_at(&fadt, 140));
    assert_eq!(&dsdt[..4], b"DSDT");
    assert_eq!(sum(&dsdt), 0);
    let count = dsdt.windows(8).filter(|w| *w == b"LNRO0005").count();
    assert_eq!(count, 5);
    assert!(dsdt.windows(8).any(|w| w == b"VMGENCTR"));
}

#[test]
fn the_largest_machine_has_a_keyboard_controller_where_it_is_asked_for() {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
    for legacy_devices in [false, true] {
        let rsdp = write_tables(&memory, MAX_VCPUS, layout::VIRTIO_DEVICES, legacy_devices);
        let xsdt: u64 = memory.read_obj(GuestAddress(rsdp.unwrap() + 24)).unwrap();
        let fadt = table(&memory, u64_at(&table(&memory, xsdt), 36));
        let dsdt = table(&memory, u64_at(&fadt, 140));
        assert_eq!(fadt[109] & 2 != 0, legacy_devices, "boot flags");
        // PNP0303 as an EISA id.
        let found = dsdt.windows(4).any(|w| w == [0x41, 0xd0, 0x03, 0x03]);
        assert_eq!(found, legacy_devices);
        let devices = dsdt.windows(8).filter(|w| *w == b"LNRO0005").count();
        assert_eq!(u32::try_from(devices).unwrap(), layout::VIRTIO_DEVICES);
    }
}
