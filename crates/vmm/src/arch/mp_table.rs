//! The table of processors and interrupts for kernels that do not use ACPI: Intel's MultiProcessor
//! Specification 1.4, chapter 4.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::layout;
use crate::config::MAX_VCPUS;

/// Bytes of the parts.
const POINTER: usize = 16;
const HEADER: usize = 44;
const PROCESSOR: usize = 20;
/// A bus, an I/O APIC, an interrupt.
const OTHER: usize = 8;

const SPECIFICATION: u8 = 4;
/// The version of the local APICs that KVM emulates.
const LOCAL_APIC_VERSION: u8 = 0x14;
/// The version of the I/O APIC that KVM emulates.
const IO_APIC_VERSION: u8 = 0x11;
const BUS: u8 = 0;
const ENABLED: u8 = 1;
const BOOTS: u8 = 1 << 1;
/// Family 6; an FPU and a local APIC.
const SIGNATURE: u32 = 0x600;
const FEATURES: u32 = 0x201;

/// Kinds of interrupts.
const VECTORED: u8 = 0;
const NMI: u8 = 1;
const EXTERNAL: u8 = 3;

const _: () = {
    let interrupts = layout::IO_APIC_PINS as usize + 2;
    let bytes = POINTER + HEADER + PROCESSOR * MAX_VCPUS as usize + OTHER * (2 + interrupts);
    assert!(bytes as u64 <= layout::MP_TABLE_END - layout::MP_TABLE);
};

/// Writes the table for `vcpus` processors.
pub(crate) fn write(memory: &GuestMemoryMmap, vcpus: u8) -> Result<(), GuestMemoryError> {
    memory.write_slice(&table(vcpus), GuestAddress(layout::MP_TABLE))
}

fn table(vcpus: u8) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut count = 0u16;
    let mut add = |entry: &[u8]| {
        entries.extend_from_slice(entry);
        count += 1;
    };
    for id in 0..vcpus {
        let flags = ENABLED | if id == 0 { BOOTS } else { 0 };
        let [signature, features] = [SIGNATURE, FEATURES].map(u32::to_le_bytes);
        let id = [0, id, LOCAL_APIC_VERSION, flags];
        add(&[&id[..], &signature, &features, &[0; 8]].concat());
    }
    add(&[&[1, BUS][..], b"ISA   "].concat());
    // Behind the local APICs' ids.
    let io_apic = vcpus;
    let id = [2, io_apic, IO_APIC_VERSION, ENABLED];
    add(&[id, layout::IO_APIC.to_le_bytes()].concat());
    // The flags, of polarity and trigger mode, are those of the bus: active high, edge.
    for pin in (0..layout::IO_APIC_PINS).filter_map(|pin| u8::try_from(pin).ok()) {
        add(&[3, VECTORED, 0, 0, BUS, pin, io_apic, pin]);
    }
    add(&[4, EXTERNAL, 0, 0, BUS, 0, 0, 0]);
    let every = 0xff;
    add(&[4, NMI, 0, 0, BUS, 0, every, 1]);

    let len = u16::try_from(HEADER + entries.len()).unwrap_or(u16::MAX);
    let mut table = [
        &b"PCMP"[..],
        &len.to_le_bytes(),
        &[SPECIFICATION, 0],
        b"FIRN    ",
        b"FIRNVM      ",
        &[0; 6],
        &count.to_le_bytes(),
        &layout::LOCAL_APIC.to_le_bytes(),
        &[0; 4],
        &entries,
    ]
    .concat();
    table[7] = checksum(&table);

    let start = u32::try_from(layout::MP_TABLE).unwrap_or(u32::MAX) + 16;
    let mut pointer =
        [&b"_MP_"[..], &start.to_le_bytes(), &[1, SPECIFICATION, 0], &[0; 5]].concat();
    pointer[10] = checksum(&pointer);
    [pointer, table].concat()
}

/// The byte that makes the sum of all 0.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte))
}

#[cfg(test)]
#[path = "mp_table_tests.rs"]
mod tests;
