//! The map of guest-physical memory.
//!
//! Memory below 1 MiB is laid out as Linux expects it on a PC. Device registers are in the 1 GiB
//! gap below 4 GiB, which [`firn_snapshot::MemoryLayout::for_size`] leaves free. A snapshot depends
//! on these addresses: a change requires a new machine-state version.

/// Boot GDT (64-bit Linux boot protocol), bytes.
pub(crate) const GDT: u64 = 0x500;
/// Boot parameters, the protocol's "zero page".
pub(crate) const BOOT_PARAMS: u64 = 0x7000;
/// Boot page tables: one PML4, one PDPT and four page directories, 4 KiB each.
pub(crate) const PAGE_TABLES: u64 = 0x9000;
/// The kernel's initial stack pointer; the kernel soon switches to its own stack.
pub(crate) const BOOT_STACK: u64 = 0x8ff0;
/// The kernel command line.
pub(crate) const CMDLINE: u64 = 0x2_0000;
/// The longest command line, including the final zero, bytes (`COMMAND_LINE_SIZE` of x86 Linux).
pub(crate) const CMDLINE_CAPACITY: usize = 2048;
/// End of conventional memory; memory from here to 1 MiB is reserved.
pub(crate) const CONVENTIONAL_END: u64 = 0x9_fc00;
/// The table of processors for kernels without ACPI, where such a kernel looks for it: in the last
/// KiB below 640 KiB.
pub(crate) const MP_TABLE: u64 = CONVENTIONAL_END;
/// End of the memory for this table.
pub(crate) const MP_TABLE_END: u64 = 0xa_0000;
/// The 16 bytes of the VM generation id, in reserved memory, which the guest does not allocate.
pub(crate) const GENERATION_ID: u64 = 0xc_0000;
/// ACPI tables. The root pointer is first, in the area that a BIOS search covers.
pub(crate) const ACPI: u64 = 0xe_0000;
/// End of the memory for ACPI tables.
pub(crate) const ACPI_END: u64 = 0x10_0000;
/// Start of extended memory; the kernel is loaded above.
pub(crate) const HIGH_MEMORY: u64 = 0x10_0000;

/// First virtio-mmio window; device `n` is at `VIRTIO_MMIO + n * VIRTIO_MMIO_LEN`.
pub(crate) const VIRTIO_MMIO: u32 = 0xd000_0000;
/// Bytes of one virtio-mmio window.
pub(crate) const VIRTIO_MMIO_LEN: u32 = 0x1000;
/// The I/O APIC of KVM's irqchip.
pub(crate) const IO_APIC: u32 = 0xfec0_0000;
/// The local APICs of KVM's irqchip.
pub(crate) const LOCAL_APIC: u32 = 0xfee0_0000;
/// One page that VMX requires for real mode, directly above KVM's identity map.
pub(crate) const KVM_TSS: usize = 0xfffb_d000;
/// The page of KVM's identity map.
pub(crate) const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;

/// First port of the serial console, COM1.
pub(crate) const SERIAL_PORT: u16 = 0x3f8;
/// Number of ports of the serial console.
pub(crate) const SERIAL_PORTS: u16 = 8;
/// ACPI sleep control register (a port).
pub(crate) const SLEEP_CONTROL_PORT: u16 = 0x600;
/// ACPI sleep status register (a port); always reads 0.
pub(crate) const SLEEP_STATUS_PORT: u16 = 0x601;
/// ACPI reset register (a port).
pub(crate) const RESET_PORT: u16 = 0x602;

/// Data port of the keyboard controller.
pub(crate) const KEYBOARD_DATA_PORT: u16 = 0x60;
/// Status and command port of the keyboard controller.
pub(crate) const KEYBOARD_COMMAND_PORT: u16 = 0x64;

/// Interrupt of the keyboard controller.
pub(crate) const KEYBOARD_GSI: u32 = 1;
/// Interrupt of the serial console.
pub(crate) const SERIAL_GSI: u32 = 4;
/// Interrupt of the ACPI generic event device, which announces a new VM generation id.
pub(crate) const GENERATION_GSI: u32 = 5;
/// First interrupt of the virtio devices: device `n` has `VIRTIO_GSI + n`.
pub(crate) const VIRTIO_GSI: u32 = 6;
/// The pins of the I/O APIC of KVM's irqchip: each interrupt has its own.
pub(crate) const IO_APIC_PINS: u32 = 24;
/// The most virtio devices.
pub(crate) const VIRTIO_DEVICES: u32 = IO_APIC_PINS - VIRTIO_GSI;
