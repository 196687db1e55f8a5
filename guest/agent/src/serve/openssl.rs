//! Makes every copy of OpenSSL in the function's processes reseed, whatever it is linked into.
//!
//! OpenSSL from 1.1.1 on has trees of random generators. Each remembers the process id of its last
//! draw and takes new entropy when it draws under another one, as in a child process
//! (`openssl_get_fork_id`; `ossl_prov_drbg_generate` in providers/implementations/rands/drbg.c). It
//! also reseeds after 7 minutes or an hour, or when the clock is before the last reseed, but it
//! compares times when it draws: a clock that is set back afterwards leaves no trace, and a clone
//! may draw within these times.
//!
//! So the programs with a copy get a `getpid` of their own, which returns another number in each
//! clone. Only the program or library that contains the copy calls it. All is written while the
//! processes are stopped.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSymbol, ObjectSymbolTable, ReadCache, RelocationTarget};
use rustix::fs::OFlags;

use super::maps::Mapped;

/// The personalisation string of every generator, which no linker removes.
const MARK: &[u8] = b"OpenSSL NIST SP 800-90A DRBG";

/// `endbr64; mov eax, NUMBER; ret`, with the number at [`NUMBER_AT`].
const GETPID: [u8; 10] = [0xf3, 0x0f, 0x1e, 0xfa, 0xb8, 0, 0, 0, 0, 0xc3];

const NUMBER_AT: u64 = 5;

/// The first number. Process ids are below 2^22.
const FIRST_NUMBER: u32 = 1 << 24;

const PAGE: u64 = 4096;

/// The size of reads past the page cache, whose pages would stay in the snapshot.
const BLOCK: usize = 64 << 10;

/// The copies that a process has.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    /// The memory of each process, open because a clone need not find it, and the address of its
    /// `getpid`.
    taken_over: Vec<(File, u64)>,
    /// The number that they return.
    number: u32,
}

/// A mapping of a process.
#[derive(Debug, Clone)]
struct Mapping {
    start: u64,
    end: u64,
    offset: u64,
    executable: bool,
}

/// A program or library of a process.
#[derive(Debug)]
struct Program {
    /// The end of its code. The rest of the page is free.
    code_end: Option<u64>,
    /// The addresses that hold the address of `getpid`, if it contains OpenSSL.
    slots: Vec<u64>,
}

impl Copies {
    /// Gives the stopped `processes` their own `getpid`, where they have copies of OpenSSL. Each
    /// generator reseeds at its next draw.
    pub(crate) fn take_over(processes: &[u32], earlier: &Self) -> io::Result<Self> {
        let mut copies = Self { taken_over: Vec::new(), number: earlier.next() };
        for &process in processes {
            copies.taken_over.extend(take_over(process, copies.number)?);
        }
        Ok(copies)
    }

    /// Makes every generator reseed at its next draw.
    pub(crate) fn renew(&mut self) -> io::Result<()> {
        self.number = self.next();
        for (memory, address) in &self.taken_over {
            match memory.write_all_at(&self.number.to_le_bytes(), address + NUMBER_AT) {
                // The process has ended.
                Err(error) if error.kind() == io::ErrorKind::WriteZero => {}
                renewed => renewed?,
            }
        }
        Ok(())
    }

    fn next(&self) -> u32 {
        self.number.max(FIRST_NUMBER) + 1
    }
}

/// Writes the `getpid` of a process, and its address into every program with a copy. Returns the
/// memory of the process, and where its `getpid` is.
fn take_over(process: u32, number: u32) -> io::Result<Option<(File, u64)>> {
    let mut programs = Vec::new();
    for mappings in mappings(process)?.values() {
        programs.extend(program(process, mappings)?);
    }
    let slots: Vec<u64> = programs.iter().flat_map(|program| program.slots.clone()).collect();
    if slots.is_empty() {
        return Ok(None);
    }
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{process}/mem"))?;
    let address = room(&memory, &programs)?;
    let mut code = GETPID;
    let number_at = usize::try_from(NUMBER_AT).map_err(io::Error::other)?;
    code[number_at..number_at + 4].copy_from_slice(&number.to_le_bytes());
    memory.write_all_at(&code, address)?;
    for slot in slots {
        memory.write_all_at(&address.to_le_bytes(), slot)?;
    }
    Ok(Some((memory, address)))
}

/// The mappings of each file.
fn mappings(process: u32) -> io::Result<BTreeMap<String, Vec<Mapping>>> {
    let mut files = BTreeMap::<String, Vec<Mapping>>::new();
    for line in fs::read_to_string(format!("/proc/{process}/maps"))?.lines() {
        let unknown = || io::Error::other(format!("{line:?} is no mapping"));
        let Mapped { addresses, rights, offset, device, inode, .. } =
            Mapped::parse(line).ok_or_else(unknown)?;
        if inode != "0" {
            files.entry(format!("{device} {inode}")).or_default().push(Mapping {
                start: addresses.start,
                end: addresses.end,
                offset,
                executable: rights.contains('x'),
            });
        }
    }
    Ok(files)
}

/// The program or library that a file is, unless it is neither.
fn program(process: u32, mappings: &[Mapping]) -> io::Result<Option<Program>> {
    let first = mappings.iter().find(|mapping| mapping.offset == 0);
    let (Some(first), true) = (first, mappings.iter().any(|mapping| mapping.executable)) else {
        return Ok(None);
    };
    let path =
        PathBuf::from(format!("/proc/{process}/map_files/{:x}-{:x}", first.start, first.end));
    let cache = ReadCache::new(File::open(&path)?);
    let Ok(elf) = ElfFile64::<Endianness, _>::parse(&cache) else { return Ok(None) };
    let endian = elf.endian();
    let loaded = || {
        let headers = elf.elf_program_headers().iter();
        headers.filter(move |header| header.p_type(endian) == object::elf::PT_LOAD)
    };
    let Some(lowest) = loaded().next() else { return Ok(None) };
    let base = first.start.wrapping_sub(lowest.p_vaddr(endian) & !(PAGE - 1));
    let code = loaded().find(|header| header.p_flags(endian).contains(object::elf::PF_X));
    let code_end = code
        .map(|code| base.wrapping_add(code.p_vaddr(endian)).wrapping_add(code.p_filesz(endian)));
    let mut slots = slots(&elf, base);
    if !slots.is_empty() && !contains_mark(&path)? {
        slots.clear();
    }
    Ok(Some(Program { code_end, slots }))
}

/// The addresses that the dynamic linker sets to that of `getpid`.
fn slots<'data>(elf: &ElfFile64<'data, Endianness, &'data ReadCache<File>>, base: u64) -> Vec<u64> {
    let (Some(relocations), Some(symbols)) =
        (elf.dynamic_relocations(), elf.dynamic_symbol_table())
    else {
        return Vec::new();
    };
    let getpid = symbols.symbols().find(|symbol| symbol.name_bytes() == Ok(b"getpid"));
    let Some(getpid) = getpid else { return Vec::new() };
    let of_getpid = relocations
        .filter(|(_, relocation)| relocation.target() == RelocationTarget::Symbol(getpid.index()));
    of_getpid.map(|(at, _)| base.wrapping_add(at)).collect()
}

/// Whether a file contains [`MARK`].
fn contains_mark(path: &Path) -> io::Result<bool> {
    let direct = i32::try_from(OFlags::DIRECT.bits()).map_err(io::Error::other)?;
    let file = OpenOptions::new().read(true).custom_flags(direct).open(path);
    let file = file.or_else(|_| File::open(path))?;
    let mut memory = vec![Block([0; BLOCK])];
    let finder = memchr::memmem::Finder::new(MARK);
    let mut tail = Vec::new();
    for at in (0_u64..).step_by(BLOCK) {
        let [Block(block)] = memory.as_mut_slice() else { return Ok(false) };
        let count = file.read_at(block, at)?;
        // The mark may begin in the block before.
        tail.extend_from_slice(&block[..count.min(MARK.len())]);
        if finder.find(&tail).is_some() || finder.find(&block[..count]).is_some() {
            return Ok(true);
        }
        if count < BLOCK {
            break;
        }
        tail = block[count - MARK.len()..].to_vec();
    }
    Ok(false)
}

/// Memory that can be read into past the page cache.
#[derive(Clone)]
#[repr(align(4096))]
struct Block([u8; BLOCK]);

/// A free place for [`GETPID`], or the one that has it already, behind the code of a program.
fn room(memory: &File, programs: &[Program]) -> io::Result<u64> {
    for end in programs.iter().filter_map(|program| program.code_end) {
        let at = end.next_multiple_of(16);
        let mut there = GETPID;
        if (end - 1) / PAGE == (at + 16) / PAGE && memory.read_exact_at(&mut there, at).is_ok() {
            let mut ours = there;
            ours[5..9].fill(0);
            if there == [0; 10] || ours == GETPID {
                return Ok(at);
            }
        }
    }
    Err(io::Error::other("no program of a process with OpenSSL has room behind its code"))
}

#[cfg(test)]
#[path = "openssl_tests.rs"]
mod tests;
