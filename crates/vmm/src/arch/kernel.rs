//! Loading a Linux kernel into guest memory for the 64-bit boot protocol
//! (`Documentation/arch/x86/boot.rst`).

use std::fmt::Write;
use std::fs::File;
use std::io::{self, Seek};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use linux_loader::loader::bootparam::{XLF_KERNEL_64, boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::bzimage::{self, BzImage};
use linux_loader::loader::{self, KernelLoader, elf::Elf};
use thiserror::Error;
use vm_memory::{
    Address, ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError,
    GuestMemoryMmap, GuestMemoryRegion,
};

use super::{acpi, boot_regs, layout, mp_table};
use crate::open_file::OpenFile;

/// The command line of firn's own guests, to which a caller may add: a serial console, an immediate
/// reset after a panic, no probing for PCI, and random numbers from the processor's instruction
/// (the host adds its own). What guests do not use, and each clone would get pages for, is off: the
/// accounting of memory by control groups and of pressure, and security modules without a policy.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=acpi mitigations=off \
                                   tsc=reliable random.trust_cpu=on pci=off \
                                   cgroup_disable=memory psi=0 lsm=landlock,yama";

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448;
/// `type_of_loader`: a loader without an assigned number.
const LOADER_UNDEFINED: u8 = 0xff;
const KERNEL_ALIGNMENT: u32 = 0x100_0000;
const PAGE: u64 = 4096;

/// Of a bzImage: the position and the value of the header's magic number, the offset of the 64-bit
/// entry from the load address, and the oldest version of the protocol that has the fields for it.
const HEADER_MAGIC_AT: u64 = 0x202;
const ENTRY_64: u64 = 0x200;
const PROTOCOL_64: u16 = 0x20c;

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
    /// The file is neither a 64-bit little-endian ELF kernel nor a 64-bit bzImage.
    #[error(
        "{path} is not a bootable kernel ({reason}): use an uncompressed ELF `vmlinux` or a \
         bzImage, both for x86-64"
    )]
    NotKernel {
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
    pub(crate) initramfs: Option<&'a mut OpenFile>,
    pub(crate) cmdline: &'a str,
    /// Whether the virtio devices are added to the command line.
    pub(crate) device_arguments: bool,
    pub(crate) vcpus: u8,
    pub(crate) virtio_devices: u32,
    pub(crate) legacy_devices: bool,
}

/// A kernel in guest memory.
struct Loaded {
    /// The address at which the first vCPU starts.
    entry: u64,
    /// The end of what the kernel uses before it knows its memory.
    end: u64,
    /// The header of a bzImage, for the boot parameters.
    header: setup_header,
}

/// Loads kernel, initramfs, command line, boot parameters, page tables, ACPI tables and the table
/// for kernels without ACPI. Returns the address at which the first vCPU starts.
pub(crate) fn load(
    memory: &GuestMemoryMmap,
    kernel: &mut Kernel<'_>,
) -> Result<u64, LoadKernelError> {
    let mut cmdline = command_line(kernel).into_bytes();
    let limit = layout::CMDLINE_CAPACITY;
    if cmdline.len() >= limit {
        return Err(LoadKernelError::CommandLine { length: cmdline.len(), limit: limit - 1 });
    }
    let low_memory =
        memory.find_region(GuestAddress(0)).map_or(0, |region| region.last_addr().raw_value() + 1);
    if low_memory <= layout::HIGH_MEMORY {
        return Err(LoadKernelError::TooLittleMemory { memory: low_memory });
    }

    let loaded = if is_bzimage(&kernel.kernel.file) {
        load_bzimage(memory, kernel.kernel, low_memory)?
    } else {
        load_elf(memory, kernel.kernel, low_memory)?
    };
    let initramfs = match &mut kernel.initramfs {
        Some(initramfs) => load_initramfs(memory, initramfs, &loaded, low_memory)?,
        None => (0, 0),
    };

    cmdline.push(0);
    memory.write_slice(&cmdline, GuestAddress(layout::CMDLINE))?;

    let Kernel { vcpus, virtio_devices, legacy_devices, .. } = *kernel;
    let rsdp = acpi::write_tables(memory, vcpus, virtio_devices, legacy_devices)?;
    mp_table::write(memory, vcpus)?;
    boot_regs::write_tables(memory)?;
    let params = boot_parameters(memory, rsdp, initramfs, loaded.header);
    memory.write_slice(params.as_slice(), GuestAddress(layout::BOOT_PARAMS))?;
    Ok(loaded.entry)
}

/// The command line, with the devices before the arguments of the first process, if there are any.
fn command_line(kernel: &Kernel<'_>) -> String {
    let Kernel { cmdline, virtio_devices, device_arguments, .. } = *kernel;
    if !device_arguments {
        return cmdline.to_owned();
    }
    let (own, of_init) = match cmdline.split_once(" -- ") {
        Some((own, of_init)) => (own, Some(of_init)),
        None => (cmdline, None),
    };
    let mut line = own.to_owned();
    for device in 0..virtio_devices {
        let address = layout::VIRTIO_MMIO + device * layout::VIRTIO_MMIO_LEN;
        let (kib, interrupt) = (layout::VIRTIO_MMIO_LEN >> 10, layout::VIRTIO_GSI + device);
        // Writing to a string does not fail.
        let _ = write!(line, " virtio_mmio.device={kib}K@{address:#x}:{interrupt}");
    }
    if let Some(of_init) = of_init {
        line.push_str(" -- ");
        line.push_str(of_init);
    }
    line
}

fn is_bzimage(file: &File) -> bool {
    let mut magic = [0; 4];
    let read = file.read_exact_at(&mut magic, HEADER_MAGIC_AT);
    read.is_ok() && magic == HEADER_MAGIC.to_le_bytes()
}

fn read_error(path: &Path) -> impl Fn(io::Error) -> LoadKernelError {
    move |source| LoadKernelError::Read { path: path.to_owned(), source }
}

/// Loads a bzImage. It decompresses itself to memory that its header names.
fn load_bzimage(
    memory: &GuestMemoryMmap,
    OpenFile { file, path }: &mut OpenFile,
    low_memory: u64,
) -> Result<Loaded, LoadKernelError> {
    let refused =
        |reason: &str| LoadKernelError::NotKernel { path: path.clone(), reason: reason.to_owned() };
    let loaded = BzImage::load(memory, None, file, Some(GuestAddress(layout::HIGH_MEMORY)));
    let loaded = loaded.map_err(|error| match error {
        loader::Error::Bzimage(bzimage::Error::ReadBzImageCompressedKernel) => {
            LoadKernelError::TooLittleMemory { memory: low_memory }
        }
        other => refused(&other.to_string()),
    })?;
    let header = loaded.setup_header.unwrap_or_default();
    // The structure is packed, so its fields are copied.
    let (version, flags) = (header.version, header.xloadflags);
    if version < PROTOCOL_64 || flags & XLF_KERNEL_64 == 0 {
        return Err(refused("it has no 64-bit entry"));
    }
    let (preferred, size) = (header.pref_address, u64::from(header.init_size));
    let start = loaded.kernel_load.raw_value();
    let end = preferred.max(start).checked_add(size).map(|end| end.max(loaded.kernel_end));
    match end {
        Some(end) if end <= low_memory => Ok(Loaded { entry: start + ENTRY_64, end, header }),
        _ => Err(LoadKernelError::TooLittleMemory { memory: low_memory }),
    }
}

fn load_elf(
    memory: &GuestMemoryMmap,
    OpenFile { file, path }: &mut OpenFile,
    low_memory: u64,
) -> Result<Loaded, LoadKernelError> {
    let length = file.metadata().map_err(read_error(path))?.len();
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
            LoadKernelError::NotKernel { path: path.clone(), reason }
        },
    )?;
    let header = setup_header {
        boot_flag: BOOT_FLAG,
        header: HEADER_MAGIC,
        kernel_alignment: KERNEL_ALIGNMENT,
        ..Default::default()
    };
    Ok(Loaded { entry: loaded.kernel_load.raw_value(), end: loaded.kernel_end, header })
}

/// Loads the initramfs at the highest possible address, away from the memory that the kernel uses
/// early.
fn load_initramfs(
    memory: &GuestMemoryMmap,
    OpenFile { file, path }: &mut OpenFile,
    kernel: &Loaded,
    low_memory: u64,
) -> Result<(u64, u64), LoadKernelError> {
    file.rewind().map_err(read_error(path))?;
    let length = file.metadata().map_err(read_error(path))?.len();
    let too_little = LoadKernelError::TooLittleMemory { memory: low_memory };
    // A bzImage names the last address that it can use.
    let highest = match kernel.header.initrd_addr_max {
        0 => low_memory,
        last => low_memory.min(u64::from(last) + 1),
    };
    let Some(start) = highest.checked_sub(length).map(|start| start & !(PAGE - 1)) else {
        return Err(too_little);
    };
    if start < kernel.end {
        return Err(too_little);
    }
    let count = usize::try_from(length).map_err(|_| too_little)?;
    memory.read_exact_volatile_from(GuestAddress(start), file, count)?;
    Ok((start, length))
}

fn boot_parameters(
    memory: &GuestMemoryMmap,
    rsdp: u64,
    initramfs: (u64, u64),
    header: setup_header,
) -> boot_params {
    let mut params = boot_params { acpi_rsdp_addr: rsdp, hdr: header, ..Default::default() };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
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
