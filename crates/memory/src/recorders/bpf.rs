//! A BPF program that writes down when each page of one file entered the page cache.
//!
//! SnapBPF (3.1) hooks the kernel where it adds pages to the page cache. Here the program is at the end of the function
//! `filemap_add_folio` (fexit), where the kernel lets it, and else at the tracepoint `filemap:mm_filemap_add_to_page_cache`, which is
//! in that place, too. The program is some thirty instructions and is assembled here: so firn needs neither a compiler for BPF nor
//! a library that loads its output. Its map is an array with an entry for each page of the file: the time of the first entry and,
//! in the lowest bits, the order of the folio that the page was the first of.
//!
//! This module has `unsafe` of its own: bpf(2) and perf_event_open(2) have no safe wrapper.

use std::fmt;
use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use firn_base::PAGE_SIZE;
use rustix::fs::{Mode, OFlags, fstat, major, minor, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use thiserror::Error;

use super::kernel_types::AddFolio;
use crate::map::Mapping;

const TRACEPOINT: &str = "events/filemap/mm_filemap_add_to_page_cache";
/// Of an entry: as many bits are the folio's order. The others are ns of CLOCK_MONOTONIC, of which nine years fit.
const ORDER_BITS: u8 = 6;
const ORDER: u64 = (1 << ORDER_BITS) - 1;

// From linux/bpf.h and linux/perf_event.h.
const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_RAW_TRACEPOINT_OPEN: libc::c_int = 17;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_PROG_TYPE_TRACEPOINT: u32 = 5;
const BPF_PROG_TYPE_TRACING: u32 = 26;
const BPF_TRACE_FEXIT: u32 = 25;
const BPF_FUNC_MAP_LOOKUP_ELEM: i32 = 1;
const BPF_FUNC_KTIME_GET_NS: i32 = 5;
const PERF_TYPE_TRACEPOINT: u32 = 2;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;
const PERF_EVENT_IOC_ENABLE: libc::c_ulong = 0x2400;
const PERF_EVENT_IOC_SET_BPF: libc::c_ulong = 0x4004_2408;

/// Why the page cache cannot be watched.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BpfError {
    /// The tracepoint cannot be looked up.
    #[error(
        "the tracepoint filemap:mm_filemap_add_to_page_cache cannot be had: run as root, on a kernel with tracepoints"
    )]
    Tracepoint(#[source] io::Error),
    /// The tracepoint's record is not as expected.
    #[error("the tracepoint filemap:mm_filemap_add_to_page_cache has no field {0} on this kernel")]
    Field(&'static str),
    /// The file cannot be looked at.
    #[error("examining the file to watch")]
    File(#[source] io::Error),
    /// The kernel takes no map or program.
    #[error("the kernel does not take the BPF {what}: run as root, on a kernel with BPF")]
    Refused {
        /// Map or program.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The program cannot be attached.
    #[error("the BPF program cannot be attached to the tracepoint")]
    Attach(#[source] io::Error),
    /// The map cannot be read.
    #[error("reading what the BPF program wrote down")]
    Read(#[source] io::Error),
}

/// Where a page entered the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entered {
    /// When, in ns of CLOCK_MONOTONIC.
    pub(super) at_ns: u64,
    /// How many pages entered with it, itself included.
    pub(super) pages: u64,
}

/// The program at work. Dropping it takes it away.
#[derive(Debug)]
pub(super) struct Capture {
    map: OwnedFd,
    pages: u32,
    attached: Option<OwnedFd>,
}

impl Capture {
    /// Watches a file's first `pages` pages from now on.
    pub(super) fn start(hook: &Hook, file: &File, pages: u64) -> Result<Self, BpfError> {
        let stat = fstat(file).map_err(|errno| BpfError::File(errno.into()))?;
        // As the kernel has it within itself; user space is given another encoding.
        let device = major(stat.st_dev) << 20 | minor(stat.st_dev);
        let pages = u32::try_from(pages).unwrap_or(u32::MAX).min(i32::MAX.unsigned_abs());
        let map = create_map(pages).map_err(|source| BpfError::Refused { what: "map", source })?;
        let program = program(hook, device, stat.st_ino, pages, map.as_raw_fd());
        let program =
            load(hook, &program).map_err(|source| BpfError::Refused { what: "program", source })?;
        let attached = match hook {
            Hook::Function(_) => attach_to_function(&program),
            Hook::Tracepoint(tracepoint) => attach_to_tracepoint(tracepoint.id, &program),
        };
        Ok(Self { map, pages, attached: Some(attached.map_err(BpfError::Attach)?) })
    }

    /// Watches no longer.
    pub(super) fn stop(&mut self) {
        self.attached = None;
    }

    /// What entered, by page: the first time of each.
    pub(super) fn entered(&self) -> Result<Vec<Option<Entered>>, BpfError> {
        let values = read_map(&self.map, self.pages).map_err(BpfError::Read)?;
        Ok(values.into_iter().map(entered).collect())
    }
}

/// Where a program can see pages enter.
#[derive(Debug)]
pub(super) enum Hook {
    Function(AddFolio),
    Tracepoint(Tracepoint),
}

impl Hook {
    /// The function where the kernel lets it, else the tracepoint. The page cache holds nothing of the file, and its first page
    /// afterwards, maybe.
    pub(super) fn find(file: &File) -> Result<Self, BpfError> {
        let function = AddFolio::find().map(Self::Function);
        match function.filter(|function| function.sees_a_fault(file).is_ok_and(|seen| seen)) {
            Some(function) => Ok(function),
            None => Ok(Self::Tracepoint(Tracepoint::find()?)),
        }
    }

    /// Whether a program there runs when a fault brings a page in. A kernel may refuse programs at functions, and its compiler may
    /// have put the function into its callers, where nothing is seen of it.
    fn sees_a_fault(&self, file: &File) -> Result<bool, BpfError> {
        let fault = || -> io::Result<()> {
            let page = Mapping::reserve(PAGE_SIZE, PAGE_SIZE)?;
            page.map_private(page.base(), PAGE_SIZE, file, 0)?;
            page.advise_random(page.base(), PAGE_SIZE)?;
            Ok(page.populate_read(page.base(), PAGE_SIZE)?)
        };
        let capture = Capture::start(self, file, 1)?;
        fault().map_err(BpfError::File)?;
        Ok(capture.entered()?.iter().flatten().count() == 1)
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Function(_) => "the end of filemap_add_folio (fexit)",
            Self::Tracepoint(_) => "the tracepoint filemap:mm_filemap_add_to_page_cache",
        })
    }
}

fn entered(value: u64) -> Option<Entered> {
    let entered = Entered { at_ns: value >> ORDER_BITS, pages: 1 << (value & ORDER).min(30) };
    (value != 0).then_some(entered)
}

/// The tracepoint's number, and where the fields are in its record.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tracepoint {
    id: u64,
    inode: i16,
    index: i16,
    device: i16,
    /// Kernels without large folios have none.
    order: Option<i16>,
}

impl Tracepoint {
    /// Reads tracefs by a mount of its own, which nobody else sees and which ends with its descriptor.
    fn find() -> Result<Self, BpfError> {
        let mounted = || -> rustix::io::Result<OwnedFd> {
            let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&context)?;
            let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        };
        let tracefs = mounted().map_err(|errno| BpfError::Tracepoint(errno.into()))?;
        let read = |name: &str| -> io::Result<String> {
            let path = format!("{TRACEPOINT}/{name}");
            let file = openat(&tracefs, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            io::read_to_string(File::from(file))
        };
        let id = read("id").map_err(BpfError::Tracepoint)?;
        let id = id.trim().parse().map_err(|_| BpfError::Field("id"))?;
        let format = read("format").map_err(BpfError::Tracepoint)?;
        Ok(Self { id, ..Self::parse(&format)? })
    }

    fn parse(format: &str) -> Result<Self, BpfError> {
        let field = |name: &'static str, size: &str| {
            let mut lines = format.lines().filter_map(|line| {
                let (declaration, rest) = line.trim().strip_prefix("field:")?.split_once(';')?;
                let mut rest = rest.split(';').filter_map(|part| part.trim().split_once(':'));
                let is = declaration.rsplit(' ').next() == Some(name);
                let offset = rest.next().filter(|_| is)?.1.parse::<i16>().ok()?;
                (rest.next()?.1 == size).then_some(offset)
            });
            lines.next().ok_or(BpfError::Field(name))
        };
        Ok(Self {
            id: 0,
            inode: field("i_ino", "8")?,
            index: field("index", "8")?,
            device: field("s_dev", "4")?,
            order: field("order", "1").ok(),
        })
    }
}

/// One instruction (linux/bpf.h, `struct bpf_insn`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Insn {
    code: u8,
    /// Destination in the low four bits, source in the high ones.
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn insn(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> Insn {
    Insn { code, registers: src << 4 | dst, offset, immediate }
}

/// A load of 64 bits takes two instructions.
fn load_immediate(dst: u8, src: u8, value: u64) -> [Insn; 2] {
    let half = |bytes: [u8; 4]| i32::from_le_bytes(bytes);
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [insn(0x18, dst, src, 0, half([a, b, c, d])), insn(0, 0, 0, 0, half([e, f, g, h]))]
}

// Registers: 0 results, 1 to 5 arguments, 6 to 9 kept over calls, 10 the frame.
const LDX_U8: u8 = 0x71;
const LDX_U32: u8 = 0x61;
const LDX_U64: u8 = 0x79;
const STX_U32: u8 = 0x63;
const STX_U64: u8 = 0x7b;
const MOV_REG: u8 = 0xbf;
const MOV: u8 = 0xb7;
const ADD: u8 = 0x07;
const AND: u8 = 0x57;
const LSH: u8 = 0x67;
const RSH: u8 = 0x77;
const OR_REG: u8 = 0x4f;
const JEQ: u8 = 0x15;
const JNE: u8 = 0x55;
const JNE_U32: u8 = 0x56;
const JNE_REG: u8 = 0x5d;
const JGE: u8 = 0x35;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const PSEUDO_MAP_FD: u8 = 1;
/// An offset that becomes the way to the end.
const END: i16 = i16::MAX;

/// Goes on only for the file, with the page's index in register 7 and the folio's order in register 8.
fn at_function(at: &AddFolio, device: u32, inode: u64) -> Vec<Insn> {
    let mut program = vec![
        insn(LDX_U64, 2, 1, AddFolio::RETURNED, 0),
        insn(JNE_U32, 2, 0, END, 0),
        insn(LDX_U64, 2, 1, AddFolio::MAPPING, 0),
        insn(LDX_U64, 2, 2, at.inode, 0),
        insn(LDX_U64, 4, 2, at.number, 0),
    ];
    program.extend(load_immediate(3, 0, inode));
    program.extend([
        insn(JNE_REG, 4, 3, END, 0),
        insn(LDX_U64, 2, 2, at.superblock, 0),
        insn(LDX_U32, 4, 2, at.device, 0),
    ]);
    program.extend(load_immediate(3, 0, u64::from(device)));
    program.extend([
        insn(JNE_REG, 4, 3, END, 0),
        insn(LDX_U64, 7, 1, AddFolio::INDEX, 0),
        insn(MOV, 8, 0, 0, 0),
        insn(LDX_U64, 2, 1, AddFolio::FOLIO, 0),
        insn(LDX_U64, 3, 2, at.flags, 0),
        insn(RSH, 3, 0, 0, at.large),
        insn(AND, 3, 0, 0, 1),
        insn(JEQ, 3, 0, 1, 0),
        insn(LDX_U8, 8, 2, at.order, 0),
    ]);
    program
}

/// As [`at_function`], by a tracepoint's record.
fn at_tracepoint(at: &Tracepoint, device: u32, inode: u64) -> Vec<Insn> {
    let order = at.order.map_or(insn(MOV, 8, 0, 0, 0), |order| insn(LDX_U8, 8, 1, order, 0));
    let mut program = vec![insn(LDX_U32, 2, 1, at.device, 0)];
    program.extend(load_immediate(3, 0, u64::from(device)));
    program.extend([insn(JNE_REG, 2, 3, END, 0), insn(LDX_U64, 2, 1, at.inode, 0)]);
    program.extend(load_immediate(3, 0, inode));
    program.extend([insn(JNE_REG, 2, 3, END, 0), insn(LDX_U64, 7, 1, at.index, 0), order]);
    program
}

/// `if (it is of the file && index < pages) { entry = &map[index]; if (!*entry) *entry = now << 6 | order; }`
fn program(hook: &Hook, device: u32, inode: u64, pages: u32, map: RawFd) -> Vec<Insn> {
    let mut program = match hook {
        Hook::Function(function) => at_function(function, device, inode),
        Hook::Tracepoint(tracepoint) => at_tracepoint(tracepoint, device, inode),
    };
    program.extend([
        // Below 2^31, by `Capture::start`.
        insn(JGE, 7, 0, END, i32::try_from(pages).unwrap_or(i32::MAX)),
        insn(STX_U32, 10, 7, -4, 0),
        insn(AND, 8, 0, 0, (1 << ORDER_BITS) - 1),
        insn(CALL, 0, 0, 0, BPF_FUNC_KTIME_GET_NS),
        insn(LSH, 0, 0, 0, i32::from(ORDER_BITS)),
        insn(OR_REG, 0, 8, 0, 0),
        insn(MOV_REG, 7, 0, 0, 0),
    ]);
    program.extend(load_immediate(1, PSEUDO_MAP_FD, u64::from(map.unsigned_abs())));
    program.extend([
        insn(MOV_REG, 2, 10, 0, 0),
        insn(ADD, 2, 0, 0, -4),
        insn(CALL, 0, 0, 0, BPF_FUNC_MAP_LOOKUP_ELEM),
        insn(JEQ, 0, 0, END, 0),
        insn(LDX_U64, 1, 0, 0, 0),
        insn(JNE, 1, 0, END, 0),
        insn(STX_U64, 0, 7, 0, 0),
        insn(MOV, 0, 0, 0, 0),
        insn(EXIT, 0, 0, 0, 0),
    ]);
    let end = program.len() - 2;
    for (at, insn) in program.iter_mut().enumerate().filter(|(_, insn)| insn.offset == END) {
        insn.offset = i16::try_from(end - at - 1).unwrap_or(0);
    }
    program
}

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
struct LookupBatch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// The first version of `struct perf_event_attr`, 64 bytes.
#[repr(C)]
#[derive(Default)]
struct PerfEventAttr {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    config1: u64,
}

/// bpf(2) with attributes of a type of this module.
fn bpf<T>(command: libc::c_int, attributes: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: the kernel reads and writes the attributes, whose size it is told, and the buffers that they name, which their
    // makers keep alive and whose sizes they tell.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size_of::<T>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A descriptor that a system call returned.
fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made it for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn raw(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}

fn create_map(entries: u32) -> io::Result<OwnedFd> {
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

fn load(hook: &Hook, program: &[Insn]) -> io::Result<OwnedFd> {
    let attributes = match hook {
        Hook::Function(function) => ProgLoad {
            prog_type: BPF_PROG_TYPE_TRACING,
            expected_attach_type: BPF_TRACE_FEXIT,
            attach_btf_id: function.id,
            // Only a program that may be had under the GPL, too, may read the kernel's structures. This one may.
            license: c"Dual MIT/GPL".as_ptr().addr() as u64,
            ..ProgLoad::default()
        },
        Hook::Tracepoint(_) => ProgLoad {
            prog_type: BPF_PROG_TYPE_TRACEPOINT,
            license: c"Apache-2.0".as_ptr().addr() as u64,
            ..ProgLoad::default()
        },
    };
    owned(bpf(
        BPF_PROG_LOAD,
        &mut ProgLoad {
            insn_cnt: u32::try_from(program.len()).unwrap_or(0),
            insns: program.as_ptr().addr() as u64,
            ..attributes
        },
    )?)
}

fn attach_to_function(program: &OwnedFd) -> io::Result<OwnedFd> {
    // The program names its function.
    let mut attributes =
        RawTracepointOpen { prog_fd: raw(program), ..RawTracepointOpen::default() };
    owned(bpf(BPF_RAW_TRACEPOINT_OPEN, &mut attributes)?)
}

fn attach_to_tracepoint(tracepoint: u64, program: &OwnedFd) -> io::Result<OwnedFd> {
    let attributes = PerfEventAttr {
        kind: PERF_TYPE_TRACEPOINT,
        size: u32::try_from(size_of::<PerfEventAttr>()).unwrap_or(0),
        config: tracepoint,
        sample_period: 1,
        wakeup_events: 1,
        ..PerfEventAttr::default()
    };
    // Every process; the program runs on every processor, whichever the event is on.
    let (process, processor, group): (libc::pid_t, libc::c_int, libc::c_int) = (-1, 0, -1);
    // SAFETY: the kernel reads the attributes, whose size they tell.
    let event = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            std::ptr::from_ref(&attributes),
            process,
            processor,
            group,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    if event < 0 {
        return Err(io::Error::last_os_error());
    }
    let event = owned(event)?;
    // SAFETY: the call takes a descriptor as its argument and touches no memory of this process.
    let set =
        unsafe { libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_SET_BPF, program.as_raw_fd()) };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call takes no argument and touches no memory of this process.
    if unsafe { libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_ENABLE, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(event)
}

/// All entries of a map, in order.
fn read_map(map: &OwnedFd, entries: u32) -> io::Result<Vec<u64>> {
    let count = usize::try_from(entries).map_err(io::Error::other)?;
    let (mut keys, mut values, mut next) = (vec![0u32; count], vec![0u64; count], 0u32);
    let mut batch = LookupBatch {
        out_batch: std::ptr::from_mut(&mut next).addr() as u64,
        keys: keys.as_mut_ptr().addr() as u64,
        values: values.as_mut_ptr().addr() as u64,
        count: entries,
        map_fd: raw(map),
        ..LookupBatch::default()
    };
    match bpf(BPF_MAP_LOOKUP_BATCH, &mut batch) {
        Ok(_) => {}
        // Everything was read.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        Err(error) => return Err(error),
    }
    Ok(values)
}

#[cfg(test)]
#[path = "bpf_tests.rs"]
mod tests;
