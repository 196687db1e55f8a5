use std::io::Write;
use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use vm_memory::{GuestAddress, GuestMemoryMmap};

use firn_snapshot::MemoryLayout;

use super::{DEFAULT_CMDLINE, Kernel, LoadKernelError, boot_parameters, load};
use crate::open_file::OpenFile;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 32 << 20)]).unwrap()
}

fn of<'a>(kernel: &'a mut OpenFile, cmdline: &'a str) -> Kernel<'a> {
    Kernel {
        kernel,
        initramfs: None,
        cmdline,
        device_arguments: false,
        vcpus: 1,
        virtio_devices: 2,
        legacy_devices: false,
    }
}

fn load_kernel(kernel: &Path, cmdline: &str) -> Result<u64, LoadKernelError> {
    let kernel = &mut OpenFile::open(kernel).unwrap();
    load(&memory(), &mut of(kernel, cmdline))
}

#[test]
fn a_kernel_that_is_not_an_elf_file_is_refused() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[0x4d; 8192]).unwrap();
    let error = load_kernel(file.path(), DEFAULT_CMDLINE).unwrap_err();
    assert!(matches!(error, LoadKernelError::NotKernel { .. }), "{error:?}");
    assert!(error.to_string().contains("vmlinux"), "{error}");
}

#[test]
fn an_empty_kernel_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = load_kernel(file.path(), DEFAULT_CMDLINE).unwrap_err();
    assert!(matches!(error, LoadKernelError::NotKernel { .. }), "{error:?}");
}

#[test]
fn a_command_line_that_linux_would_truncate_is_refused() {
    let long = "x".repeat(2048);
    let error = load_kernel(Path::new("/dev/null"), &long).unwrap_err();
    assert!(matches!(error, LoadKernelError::CommandLine { length: 2048, limit: 2047 }));
}

#[test]
fn the_memory_map_has_all_memory_and_no_device_registers() {
    const GIB: u64 = 1 << 30;
    for (size, expected) in [
        (GIB, vec![(1 << 20, GIB)]),
        (3 * GIB, vec![(1 << 20, 3 * GIB)]),
        (5 * GIB, vec![(1 << 20, 3 * GIB), (4 * GIB, 6 * GIB)]),
    ] {
        let layout = MemoryLayout::for_size(size).unwrap();
        let ranges: Vec<_> = layout
            .regions()
            .map(|region| (GuestAddress(region.guest_addr), usize::try_from(region.len).unwrap()))
            .collect();
        let memory = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        let params = boot_parameters(&memory, 0xe_0000, (0x100_0000, 77), setup_header::default());
        let entries = &params.e820_table[..usize::from(params.e820_entries)];
        // The structure is packed, so its fields are copied.
        let ram: Vec<(u64, u64)> = entries
            .iter()
            .filter(|entry| { entry.r#type } == super::E820_RAM)
            .map(|entry| (entry.addr, entry.addr + entry.size))
            .collect();
        assert_eq!(ram[0], (0, 0x9_fc00));
        assert_eq!(ram[1..], expected, "{size}");
        assert_eq!({ params.hdr.ramdisk_size }, 77);
    }
}
