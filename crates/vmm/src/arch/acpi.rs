//! The ACPI tables of a microVM: hardware-reduced, without PCI.
//!
//! They describe the processors, the I/O APIC, the serial console, every virtio-mmio device
//! (Debian's kernels do not support `virtio_mmio.device=`), the VM generation id and the event
//! device that announces a new id, and the registers for power-off and reset. ACPI specification
//! 6.5, chapters 4.1 (hardware-reduced) and 5; generation id: Microsoft's "Virtual Machine
//! Generation ID" and the kernel's `drivers/virt/vmgenid.c`.

use acpi_tables::Aml;
use acpi_tables::aml;
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::layout;

const OEM_ID: [u8; 6] = *b"FIRN  ";
const OEM_TABLE_ID: [u8; 8] = *b"FIRNVM  ";
const OEM_REVISION: u32 = 1;
/// `SLP_TYP` of S5 in [`layout::SLEEP_CONTROL_PORT`].
pub(crate) const SLEEP_TYPE_S5: u8 = 5;
/// `SLP_EN` in the sleep control register.
pub(crate) const SLEEP_ENABLE: u8 = 1 << 5;
/// The value that the guest writes to the reset register.
pub(crate) const RESET_VALUE: u8 = 1;
/// FADT boot flags: no VGA, no MSI, no PCIe ASPM, no CMOS clock; bit 0 clear: no legacy devices.
const NO_VGA_MSI_ASPM_RTC: u16 = 0b11_1100;
/// FADT boot flag: there is a keyboard controller.
const KEYBOARD_CONTROLLER: u16 = 1 << 1;

/// Why the tables cannot be written.
#[derive(Debug, Error)]
pub enum AcpiError {
    /// The tables exceed their memory.
    #[error("the ACPI tables require {needed} bytes, and {available} are available")]
    TooLong {
        /// Bytes of the tables.
        needed: usize,
        /// Bytes available for them.
        available: usize,
    },
    /// Guest memory cannot be written.
    #[error("cannot write the ACPI tables to guest memory")]
    Memory(#[source] vm_memory::GuestMemoryError),
}

/// Writes all tables for `vcpus` processors and `virtio_devices` devices, and a keyboard controller
/// among the `legacy_devices`; returns the address of the root pointer (RSDP).
pub(crate) fn write_tables(
    memory: &GuestMemoryMmap,
    vcpus: u8,
    virtio_devices: u32,
    legacy_devices: bool,
) -> Result<u64, AcpiError> {
    let mut tables = Tables { bytes: vec![0; Rsdp::len().next_multiple_of(16)] };

    let dsdt = tables.append(&dsdt(virtio_devices, legacy_devices));
    let fadt = tables.append(&fadt(dsdt, legacy_devices));
    let madt = tables.append(&madt(vcpus));
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = tables.append(&xsdt);

    let mut rsdp = Vec::new();
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut rsdp);
    tables.bytes[..rsdp.len()].copy_from_slice(&rsdp);

    let available = usize::try_from(layout::ACPI_END - layout::ACPI).unwrap_or(usize::MAX);
    if tables.bytes.len() > available {
        return Err(AcpiError::TooLong { needed: tables.bytes.len(), available });
    }
    memory.write_slice(&tables.bytes, GuestAddress(layout::ACPI)).map_err(AcpiError::Memory)?;
    Ok(layout::ACPI)
}

struct Tables {
    bytes: Vec<u8>,
}

impl Tables {
    /// Adds a table, 16-byte aligned, and returns its guest-physical address.
    fn append(&mut self, table: &dyn Aml) -> u64 {
        let offset = self.bytes.len();
        table.to_aml_bytes(&mut self.bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        layout::ACPI + offset as u64
    }
}

fn port_register(port: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port))
}

fn fadt(dsdt: u64, legacy_devices: bool) -> impl Aml {
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        // No fixed-hardware power or sleep button.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    let legacy = if legacy_devices { KEYBOARD_CONTROLLER } else { 0 };
    fadt.iapc_boot_arch = (NO_VGA_MSI_ASPM_RTC | legacy).into();
    fadt.reset_reg = port_register(layout::RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port_register(layout::SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = port_register(layout::SLEEP_STATUS_PORT);
    fadt.finalize()
}

fn madt(vcpus: u8) -> impl Aml {
    let mut madt = MADT::new(
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
        LocalInterruptController::Address(layout::LOCAL_APIC),
    );
    for id in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IO_APIC, 0));
    madt
}

fn dsdt(virtio_devices: u32, legacy_devices: bool) -> Sdt {
    let mut body = Vec::new();
    aml::Scope::new("\\_SB_".into(), vec![&SerialPort, &GenerationId, &EventDevice])
        .to_aml_bytes(&mut body);
    if legacy_devices {
        aml::Scope::new("\\_SB_".into(), vec![&KeyboardController]).to_aml_bytes(&mut body);
    }
    for index in 0..virtio_devices {
        aml::Scope::new("\\_SB_".into(), vec![&VirtioMmio(index)]).to_aml_bytes(&mut body);
    }
    aml::Name::new(
        "\\_S5_".into(),
        &aml::Package::new(vec![&SLEEP_TYPE_S5, &aml::ZERO, &aml::ZERO, &aml::ZERO]),
    )
    .to_aml_bytes(&mut body);

    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    dsdt.append_slice(&body);
    dsdt
}

/// An edge-triggered, active-high, exclusive interrupt.
fn interrupt(gsi: u32) -> aml::Interrupt {
    aml::Interrupt::new(true, true, false, false, gsi)
}

struct SerialPort;

impl Aml for SerialPort {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        aml::Device::new(
            "COM1".into(),
            vec![
                &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
                &aml::Name::new("_UID".into(), &aml::ZERO),
                &aml::Name::new(
                    "_CRS".into(),
                    &aml::ResourceTemplate::new(vec![
                        &aml::IO::new(layout::SERIAL_PORT, layout::SERIAL_PORT, 0, 8),
                        &interrupt(layout::SERIAL_GSI),
                    ]),
                ),
            ],
        )
        .to_aml_bytes(sink);
    }
}

struct KeyboardController;

impl Aml for KeyboardController {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        let port = |port| aml::IO::new(port, port, 1, 1);
        aml::Device::new(
            "KBD_".into(),
            vec![
                &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0303")),
                &aml::Name::new(
                    "_CRS".into(),
                    &aml::ResourceTemplate::new(vec![
                        &port(layout::KEYBOARD_DATA_PORT),
                        &port(layout::KEYBOARD_COMMAND_PORT),
                        &interrupt(layout::KEYBOARD_GSI),
                    ]),
                ),
            ],
        )
        .to_aml_bytes(sink);
    }
}

struct VirtioMmio(u32);

impl Aml for VirtioMmio {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        let base = layout::VIRTIO_MMIO + self.0 * layout::VIRTIO_MMIO_LEN;
        aml::Device::new(
            aml::Path::new(&format!("V{:03}", self.0)),
            vec![
                // The id that Linux' virtio_mmio driver matches.
                &aml::Name::new("_HID".into(), &"LNRO0005"),
                &aml::Name::new("_UID".into(), &self.0),
                &aml::Name::new("_CCA".into(), &aml::ONE),
                &aml::Name::new(
                    "_CRS".into(),
                    &aml::ResourceTemplate::new(vec![
                        &aml::Memory32Fixed::new(true, base, layout::VIRTIO_MMIO_LEN),
                        &interrupt(layout::VIRTIO_GSI + self.0),
                    ]),
                ),
            ],
        )
        .to_aml_bytes(sink);
    }
}

struct GenerationId;

impl Aml for GenerationId {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        let (low, high) = (layout::GENERATION_ID & 0xffff_ffff, layout::GENERATION_ID >> 32);
        aml::Device::new(
            "VGEN".into(),
            vec![
                &aml::Name::new("_HID".into(), &"FIRN0001"),
                &aml::Name::new("_CID".into(), &"VMGENCTR"),
                &aml::Name::new("_DDN".into(), &"VM_Gen_Counter"),
                &aml::Name::new("ADDR".into(), &aml::Package::new(vec![&low, &high])),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// The generic event device: its interrupt announces a new generation id (Notify 0x80).
struct EventDevice;

impl Aml for EventDevice {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        aml::Device::new(
            "GED_".into(),
            vec![
                &aml::Name::new("_HID".into(), &"ACPI0013"),
                &aml::Name::new(
                    "_CRS".into(),
                    &aml::ResourceTemplate::new(vec![&interrupt(layout::GENERATION_GSI)]),
                ),
                &aml::Method::new(
                    "_EVT".into(),
                    1,
                    true,
                    vec![&aml::Notify::new(&aml::Path::new("\\_SB_.VGEN"), &0x80u8)],
                ),
            ],
        )
        .to_aml_bytes(sink);
    }
}

#[cfg(test)]
#[path = "acpi_tests.rs"]
mod tests;
