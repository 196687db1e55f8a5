//! Loading a Linux kernel into guest memory for the 64-bit boot protocol
//! (`Documentation/arch/x86/boot.rst`).

use std::io::{self, Seek};
use std::path::PathBuf;

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::{self, KernelLoader, elf::Elf};
use thiserror::Error;
use vm_memory::{
    Address, ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError,
    GuestMemoryMmap, GuestMemoryRegion,
};

use super::{acpi, boot_regs, layout};
use crate::open_file::OpenFile;

/// The start of every Linux guest's command line: a serial console, an immediate reset after a
/// panic, no probing for PCI, and random numbers from the processor's instruction (the host adds
/// its own).
pub(crate) const DEFAULT_CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=acpi mitigations=off \
                                   tsc=reliable random.trust_cpu=on pci=off";

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448;
/// `type_of_loader`: a loader without an assigned number.
const LOADER_UNDEFINED: u8 = 0xff;
const KERNEL_ALIGNMENT: u32 = 0x100_0000;
const PAGE: u64 = 4096;

/// Why a kernel cannot be loaded.
#[derive(Debug, Error)]
pub enum LoadKernelError {
    /// A file of the boot cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not a 64-bit little-endian ELF kernel.
    #[error(
        "{path} is not a bootable kernel ({reason}): use the uncompressed ELF `vmlinux`, \
         not a bzImage"
    )]
    NotElf {
        /// The file.
        path: PathBuf,
        /// Why it is not bootable.
        reason: String,
    },
    /// Guest memory has no room for kernel and initramfs.
    #[error(
        "guest memory of {memory} bytes is too small for kernel and initramfs: use at least 128 MiB"
    )]
    TooLittleMemory {
        /// Bytes of guest memory below the gap.
        memory: u64,
    },
    /// The command line is too long.
    #[error("the kernel command line of {length} bytes exceeds the {limit} bytes that Linux reads")]
    CommandLine {
        /// Bytes of the command line.
        length: usize,
        /// The most bytes that Linux reads.
        limit: usize,
    },
    /// Guest memory cannot be written.
    #[error("cannot write boot data to guest memory")]
    Memory(#[from] GuestMemoryError),
    /// The ACPI tables cannot be written.
    #[error("cannot describe the devices to the guest")]
    Acpi(#[from] acpi::AcpiError),
}

/// The kernel to load, and what it depends on.
pub(crate) struct Kernel<'a> {
    pub(crate) kernel: &'a mut OpenFile,
    pub(crate) initramfs: &'a mut OpenFile,
    pub(crate) cmdline: &'a str,
    pub(crate) vcpus: u8,
    pub(crate) virtio_devices: u32,
}

/// Loads kernel, initramfs, command line, boot parameters, page tables and ACPI tables. Returns the
/// address at which the first vCPU starts.
pub(crate) fn load(
    memory: &GuestMemoryMmap,
    kernel: &mut Kernel<'_>,
) -> Result<u64, LoadKernelError> {
    let limit = layout::CMDLINE_CAPACITY;
    if kernel.cmdline.len() >= limit {
        return Err(LoadKernelError::CommandLine {
            length: kernel.cmdline.len(),
            limit: limit - 1,
        });
    }
    let low_memory =
        memory.find_region(GuestAddress(0)).map_or(0, |region| region.last_addr().raw_value() + 1);
    if low_memory <= layout::HIGH_MEMORY {
        return Err(LoadKernelError::TooLittleMemory { memory: low_memory });
    }

    let (entry, kernel_end) = load_elf(memory, kernel.kernel, low_memory)?;
    let initramfs = load_initramfs(memory, kernel.initramfs, kernel_end, low_memory)?;

    let mut cmdline = kernel.cmdline.as_bytes().to_vec();
    cmdline.push(0);
    memory.write_slice(&cmdline, GuestAddress(layout::CMDLINE))?;

    let rsdp = acpi::write_tables(memory, kernel.vcpus, kernel.virtio_devices)?;
    boot_regs::write_tables(memory)?;
    let params = boot_parameters(memory, rsdp, initramfs);
    memory.write_slice(params.as_slice(), GuestAddress(layout::BOOT_PARAMS))?;
    Ok(entry)
}

fn load_elf(
    memory: &GuestMemoryMmap,
    OpenFile { file, path }: &mut OpenFile,
    low_memory: u64,
) -> Result<(u64, u64), LoadKernelError> {
    let length = file
        .metadata()
        .map_err(|source| LoadKernelError::Read { path: path.clone(), source })?
        .len();
    let loaded = Elf::load(memory, None, file, Some(GuestAddress(layout::HIGH_MEMORY))).map_err(
        |error| {
            let reason = match error {
                // Debian's kernels are linked at their alignment.
                loader::Error::Elf(loader::elf::Error::ReadKernelImage)
                    if low_memory < length + u64::from(KERNEL_ALIGNMENT) =>
                {
                    return LoadKernelError::TooLittleMemory { memory: low_memory };
                }
                loader::Error::Elf(loader::elf::Error::InvalidElfMagicNumber) => {
                    "it is not an ELF file".to_owned()
                }
                loader::Error::Elf(loader::elf::Error::ReadKernelImage) => {
                    "its segments are outside guest memory, or the file is truncated".to_owned()
                }
                loader::Error::Elf(error) => error.to_string(),
                other => other.to_string(),
            };
            LoadKernelError::NotElf { path: path.clone(), reason }
        },
    )?;
    Ok((loaded.kernel_load.raw_value(), loaded.kernel_end))
}

/// Loads the initramfs at the highest possible address, away from the memory that the kernel uses
/// early.
fn load_initramfs(
    memory: &GuestMemoryMmap,
    OpenFile { file, path }: &mut OpenFile,
    kernel_end: u64,
    low_memory: u64,
) -> Result<(u64, u64), LoadKernelError> {
    let read_error = |source| LoadKernelError::Read { path: path.clone(), source };
    file.rewind().map_err(read_error)?;
    let length = file.metadata().map_err(read_error)?.len();
    let too_little = LoadKernelError::TooLittleMemory { memory: low_memory };
    let Some(start) = low_memory.checked_sub(length).map(|start| start & !(PAGE - 1)) else {
        return Err(too_little);
    };
    if start < kernel_end {
        return Err(too_little);
    }
    let count = usize::try_from(length).map_err(|_| too_little)?;
    memory.read_exact_volatile_from(GuestAddress(start), file, count)?;
    Ok((start, length))
}

fn boot_parameters(memory: &GuestMemoryMmap, rsdp: u64, initramfs: (u64, u64)) -> boot_params {
    let mut params = boot_params { acpi_rsdp_addr: rsdp, ..Default::default() };
    params.hdr.boot_flag = BOOT_FLAG;
    params.hdr.header = HEADER_MAGIC;
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.kernel_alignment = KERNEL_ALIGNMENT;
    // All addresses are below 4 GiB, so they fit the protocol's 32-bit fields.
    params.hdr.cmd_line_ptr = u32::try_from(layout::CMDLINE).unwrap_or(u32::MAX);
    params.hdr.cmdline_size = u32::try_from(layout::CMDLINE_CAPACITY).unwrap_or(u32::MAX);
    params.hdr.ramdisk_image = u32::try_from(initramfs.0).unwrap_or(u32::MAX);
    params.hdr.ramdisk_size = u32::try_from(initramfs.1).unwrap_or(u32::MAX);

    let mut entries = vec![
        (0, layout::CONVENTIONAL_END, E820_RAM),
        (layout::CONVENTIONAL_END, layout::HIGH_MEMORY, E820_RESERVED),
    ];
    for region in memory.iter() {
        let start = region.start_addr().raw_value().max(layout::HIGH_MEMORY);
        entries.push((start, region.last_addr().raw_value() + 1, E820_RAM));
    }
    let table = params.e820_table.iter_mut();
    for (slot, (start, end, type_)) in table.zip(&entries) {
        *slot = boot_e820_entry { addr: *start, size: end - start, r#type: *type_ };
    }
    params.e820_entries = u8::try_from(entries.len()).unwrap_or(u8::MAX);
    params
}

#[cfg(test)]
#[path = "kernel_tests.rs"]
mod tests;
