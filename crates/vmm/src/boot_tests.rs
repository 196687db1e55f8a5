use std::io::Write;
use std::path::Path;

use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::{DEFAULT_CMDLINE, Kernel, LoadKernelError, load};

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 32 << 20)]).unwrap()
}

fn kernel<'a>(kernel: &'a Path, cmdline: &'a str) -> Kernel<'a> {
    Kernel { kernel, initramfs: Path::new("/dev/null"), cmdline, vcpus: 1, virtio_devices: 1 }
}

#[test]
fn a_kernel_that_is_no_elf_is_refused() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[0x4d; 8192]).unwrap();
    let error = load(&memory(), &kernel(file.path(), DEFAULT_CMDLINE)).unwrap_err();
    assert!(matches!(error, LoadKernelError::NotElf { .. }), "{error:?}");
    assert!(error.to_string().contains("vmlinux"), "{error}");
}

#[test]
fn an_empty_kernel_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = load(&memory(), &kernel(file.path(), DEFAULT_CMDLINE)).unwrap_err();
    assert!(matches!(error, LoadKernelError::NotElf { .. }), "{error:?}");
}

#[test]
fn a_missing_kernel_is_named() {
    let error = load(&memory(), &kernel(Path::new("/nonexistent"), "")).unwrap_err();
    assert_eq!(error.to_string(), "reading /nonexistent");
}

#[test]
fn a_command_line_that_linux_would_cut_is_refused() {
    let long = "x".repeat(2048);
    let error = load(&memory(), &kernel(Path::new("/nonexistent"), &long)).unwrap_err();
    assert!(matches!(error, LoadKernelError::CommandLine { length: 2048, limit: 2047 }));
}
