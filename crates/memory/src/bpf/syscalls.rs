//! bpf(2) and perf_event_open(2), which have no safe wrapper: the `unsafe` of the recorders.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use perf_event_open_sys::bindings::{PERF_FLAG_FD_CLOEXEC, PERF_TYPE_TRACEPOINT, perf_event_attr};
use perf_event_open_sys::ioctls::{ENABLE, SET_BPF};
use perf_event_open_sys::perf_event_open;

use super::program::Insn;

// From linux/bpf.h.
const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_RAW_TRACEPOINT_OPEN: libc::c_int = 17;
const BPF_BTF_GET_FD_BY_ID: libc::c_int = 19;
const BPF_BTF_GET_NEXT_ID: libc::c_int = 23;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;
const BPF_MAP_UPDATE_BATCH: libc::c_int = 26;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_PROG_TYPE_TRACEPOINT: u32 = 5;
const BPF_PROG_TYPE_TRACING: u32 = 26;
const BPF_TRACE_FEXIT: u32 = 25;

#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
    prog_btf_fd: u32,
    func_info_rec_size: u32,
    func_info: u64,
    func_info_cnt: u32,
    line_info_rec_size: u32,
    line_info: u64,
    line_info_cnt: u32,
    attach_btf_id: u32,
    attach_prog_fd: u32,
    core_relo_cnt: u32,
    fd_array: u64,
}

#[repr(C)]
#[derive(Default)]
struct ById {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

#[repr(C)]
#[derive(Default)]
struct BtfInfo {
    btf: u64,
    btf_size: u32,
    id: u32,
    name: u64,
    name_len: u32,
    kernel_btf: u32,
}

#[repr(C)]
#[derive(Default)]
struct RawTracepointOpen {
    name: u64,
    prog_fd: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Default)]
struct UpdateElem {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// The attributes of both batches.
#[repr(C)]
#[derive(Default)]
struct Batch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// bpf(2) with attributes of a type of this module.
fn bpf<T>(command: libc::c_int, attributes: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: the kernel reads and writes the attributes, whose size is an argument, and the
    // buffers that they point to, which the callers keep alive and whose sizes the attributes
    // contain.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size_of::<T>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A descriptor that a system call returned.
fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned it, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn raw(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}

/// Creates an array of 64-bit entries.
pub(super) fn create_map(entries: u32) -> io::Result<OwnedFd> {
    owned(bpf(
        BPF_MAP_CREATE,
        &mut MapCreate {
            map_type: BPF_MAP_TYPE_ARRAY,
            key_size: 4,
            value_size: 8,
            max_entries: entries.max(1),
            flags: 0,
        },
    )?)
}

/// Loads a program for the end of a kernel function, named by its BTF id.
pub(super) fn load_fexit(program: &[Insn], function: u32) -> io::Result<OwnedFd> {
    load(program, fexit(function))
}

/// The same for a program that calls functions of a module, whose types these are.
pub(super) fn load_fexit_with(
    program: &[Insn],
    function: u32,
    types: &OwnedFd,
) -> io::Result<OwnedFd> {
    // A call names the types by their place, and the first place is the kernel's own.
    let types = [0, raw(types)];
    load(program, ProgLoad { fd_array: types.as_ptr().addr() as u64, ..fexit(function) })
}

fn fexit(function: u32) -> ProgLoad {
    ProgLoad {
        prog_type: BPF_PROG_TYPE_TRACING,
        expected_attach_type: BPF_TRACE_FEXIT,
        attach_btf_id: function,
        // Only a program under a GPL-compatible licence may read the kernel's structures.
        license: c"Dual MIT/GPL".as_ptr().addr() as u64,
        ..ProgLoad::default()
    }
}

/// Loads a program for a tracepoint.
pub(super) fn load_tracepoint(program: &[Insn]) -> io::Result<OwnedFd> {
    let attributes = ProgLoad {
        prog_type: BPF_PROG_TYPE_TRACEPOINT,
        license: c"Apache-2.0".as_ptr().addr() as u64,
        ..ProgLoad::default()
    };
    load(program, attributes)
}

fn load(program: &[Insn], mut attributes: ProgLoad) -> io::Result<OwnedFd> {
    attributes.insn_cnt = u32::try_from(program.len()).unwrap_or(0);
    attributes.insns = program.as_ptr().addr() as u64;
    owned(bpf(BPF_PROG_LOAD, &mut attributes)?)
}

/// The id of the next description of types after one; `None` after the last.
pub(super) fn next_btf(id: u32) -> io::Result<Option<u32>> {
    let mut attributes = ById { id, ..ById::default() };
    match bpf(BPF_BTF_GET_NEXT_ID, &mut attributes) {
        Ok(_) => Ok(Some(attributes.next_id)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The description of types of this id.
pub(super) fn open_btf(id: u32) -> io::Result<OwnedFd> {
    owned(bpf(BPF_BTF_GET_FD_BY_ID, &mut ById { id, ..ById::default() })?)
}

/// Whose types a description has: `vmlinux` or a module; empty for those of a program.
pub(super) fn btf_name(types: &OwnedFd) -> io::Result<String> {
    // As long as a module's name can be.
    let mut name = [0u8; 64];
    let mut info = BtfInfo {
        name: name.as_mut_ptr().addr() as u64,
        name_len: u32::try_from(name.len()).unwrap_or(0),
        ..BtfInfo::default()
    };
    let mut attributes = InfoByFd {
        bpf_fd: raw(types),
        info_len: u32::try_from(size_of::<BtfInfo>()).unwrap_or(0),
        info: std::ptr::from_mut(&mut info).addr() as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attributes)?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// Attaches a program to the function that it was loaded for.
pub(super) fn attach_to_function(program: &OwnedFd) -> io::Result<OwnedFd> {
    let mut attributes =
        RawTracepointOpen { prog_fd: raw(program), ..RawTracepointOpen::default() };
    owned(bpf(BPF_RAW_TRACEPOINT_OPEN, &mut attributes)?)
}

/// Attaches a program to the tracepoint of this id.
pub(super) fn attach_to_tracepoint(tracepoint: u64, program: &OwnedFd) -> io::Result<OwnedFd> {
    let mut attributes = perf_event_attr {
        type_: PERF_TYPE_TRACEPOINT,
        size: u32::try_from(size_of::<perf_event_attr>()).unwrap_or(0),
        config: tracepoint,
        ..perf_event_attr::default()
    };
    attributes.__bindgen_anon_1.sample_period = 1;
    attributes.__bindgen_anon_2.wakeup_events = 1;
    // All processes. The program runs on every processor, whichever processor the event is on.
    let (process, processor, group) = (-1, 0, -1);
    let flags = libc::c_ulong::from(PERF_FLAG_FD_CLOEXEC);
    // SAFETY: the kernel reads the attributes, and `size` is their size.
    let event = unsafe { perf_event_open(&raw mut attributes, process, processor, group, flags) };
    let event = owned(checked(event)?.into())?;
    // SAFETY: the call takes a descriptor as its argument and touches no memory of this process.
    let set = unsafe { SET_BPF(event.as_raw_fd(), raw(program)) };
    checked(set)?;
    // SAFETY: the call takes no argument and touches no memory of this process.
    checked(unsafe { ENABLE(event.as_raw_fd(), 0) })?;
    Ok(event)
}

/// The result of a system call, or its error.
fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// All entries of a map, in order.
pub(super) fn read_map(map: &OwnedFd, entries: u32) -> io::Result<Vec<u64>> {
    let count = usize::try_from(entries).map_err(io::Error::other)?;
    let (mut keys, mut values, mut next) = (vec![0u32; count], vec![0u64; count], 0u32);
    let mut batch = Batch {
        out_batch: std::ptr::from_mut(&mut next).addr() as u64,
        keys: keys.as_mut_ptr().addr() as u64,
        values: values.as_mut_ptr().addr() as u64,
        count: entries,
        map_fd: raw(map),
        ..Batch::default()
    };
    match bpf(BPF_MAP_LOOKUP_BATCH, &mut batch) {
        Ok(_) => {}
        // The end of the map.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        Err(error) => return Err(error),
    }
    Ok(values)
}

/// Writes the first entries of a map in one call.
pub(super) fn write_map(map: &OwnedFd, values: &[u64]) -> io::Result<()> {
    let count = u32::try_from(values.len()).map_err(io::Error::other)?;
    if count == 0 {
        return Ok(());
    }
    let keys: Vec<u32> = (0..count).collect();
    bpf(
        BPF_MAP_UPDATE_BATCH,
        &mut Batch {
            keys: keys.as_ptr().addr() as u64,
            values: values.as_ptr().addr() as u64,
            count,
            map_fd: raw(map),
            ..Batch::default()
        },
    )
    .map(drop)
}

/// Writes one entry of a map.
pub(super) fn write_entry(map: &OwnedFd, key: u32, value: u64) -> io::Result<()> {
    bpf(
        BPF_MAP_UPDATE_ELEM,
        &mut UpdateElem {
            map_fd: raw(map),
            key: (&raw const key).addr() as u64,
            value: (&raw const value).addr() as u64,
            ..UpdateElem::default()
        },
    )
    .map(drop)
}
