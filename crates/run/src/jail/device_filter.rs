//! The devices that the processes of a control group of version 2 may open: a BPF program, which
//! the kernel runs at each open(2) and mknod(2) of a device (Linux
//! Documentation/admin-guide/cgroup-v2.rst, "Device controller").

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

// From linux/bpf.h.
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const BPF_CGROUP_DEVICE: u32 = 6;
const BPF_DEVCG_ACC_READ: i32 = 2;
const BPF_DEVCG_DEV_CHAR: i32 = 2;

/// The devices that are allowed, for reading: /dev/random and /dev/urandom, which a static program
/// opens for its random numbers.
const MEMORY_MAJOR: i32 = 1;
const RANDOM: i32 = 8;
const URANDOM: i32 = 9;
/// The same for a devices controller of version 1.
pub(super) const ALLOWED: [&str; 2] = ["c 1:8 r", "c 1:9 r"];

/// One instruction (linux/bpf.h, `struct bpf_insn`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Insn {
    code: u8,
    /// Destination in the low four bits, source in the high ones.
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// Loads a field of the context, whose address is in register 1.
const fn load(register: u8, offset: i16) -> Insn {
    Insn { code: 0x61, registers: 1 << 4 | register, offset, immediate: 0 }
}

const fn set_result(immediate: i32) -> Insn {
    Insn { code: 0xb7, registers: 0, offset: 0, immediate }
}

/// Skips `offset` instructions unless a register has a value.
const fn skip_unless(register: u8, immediate: i32, offset: i16) -> Insn {
    Insn { code: 0x55, registers: register, offset, immediate }
}

const fn skip_if(register: u8, immediate: i32, offset: i16) -> Insn {
    Insn { code: 0x15, registers: register, offset, immediate }
}

const EXIT: Insn = Insn { code: 0x95, registers: 0, offset: 0, immediate: 0 };

/// Returns 1, which allows, for those devices and else 0. The context is `struct
/// bpf_cgroup_dev_ctx`: the access in the high and the type in the low 16 bits, major and minor.
const PROGRAM: [Insn; 10] = [
    load(2, 0),
    load(3, 4),
    load(4, 8),
    set_result(0),
    skip_unless(2, BPF_DEVCG_ACC_READ << 16 | BPF_DEVCG_DEV_CHAR, 4),
    skip_unless(3, MEMORY_MAJOR, 3),
    skip_if(4, RANDOM, 1),
    skip_unless(4, URANDOM, 1),
    set_result(1),
    EXIT,
];

/// The beginning of the attributes of `BPF_PROG_LOAD`.
#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
}

/// The attributes of `BPF_PROG_ATTACH`.
#[repr(C)]
struct ProgAttach {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
}

/// Denies the processes of a group, and of the groups in it, all devices but the allowed one. The
/// program stays as long as the group, whose directory is open as `group`.
pub(super) fn attach(group: &File) -> io::Result<()> {
    let program = ProgLoad {
        prog_type: BPF_PROG_TYPE_CGROUP_DEVICE,
        insn_cnt: u32::try_from(PROGRAM.len()).unwrap_or(0),
        insns: PROGRAM.as_ptr().addr() as u64,
        license: c"Apache-2.0".as_ptr().addr() as u64,
    };
    let program = RawFd::try_from(bpf(BPF_PROG_LOAD, &program)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned it, and nothing else owns it.
    let program = unsafe { OwnedFd::from_raw_fd(program) };
    let attach = ProgAttach {
        target_fd: group.as_raw_fd().unsigned_abs(),
        attach_bpf_fd: program.as_raw_fd().unsigned_abs(),
        attach_type: BPF_CGROUP_DEVICE,
        attach_flags: 0,
    };
    bpf(BPF_PROG_ATTACH, &attach).map(drop)
}

/// bpf(2) with attributes of a type of this module.
fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<libc::c_long> {
    // SAFETY: the kernel reads the attributes, whose size is an argument, and the program that they
    // point to, which is static and whose size they contain.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
#[path = "device_filter_tests.rs"]
mod tests;
