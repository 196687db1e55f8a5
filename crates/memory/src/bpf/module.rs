//! Kernel functions of modules, which BPF programs call by the module's own description of its
//! types (split BTF; kernel documentation, bpf/btf.rst and bpf/kfuncs.rst).

use std::io;
use std::os::fd::OwnedFd;

use super::syscalls::{btf_name, next_btf, open_btf};

const TYPES: &str = "/sys/kernel/btf";
const KERNEL: &str = "vmlinux";

/// A function of a module.
#[derive(Debug)]
pub(super) struct ModuleFunction {
    /// The module's types.
    pub(super) types: OwnedFd,
    /// The function's type among them and the kernel's.
    pub(super) id: u32,
}

impl ModuleFunction {
    /// The function of this name in an inserted module; `None` without one.
    pub(super) fn find(module: &str, function: &str) -> io::Result<Option<Self>> {
        let read = |name: &str| match std::fs::read(format!("{TYPES}/{name}")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        };
        let Some(own) = read(module)? else { return Ok(None) };
        let kernel = read(KERNEL)?.unwrap_or_default();
        let Some(id) = function_id(&kernel, &own, function) else { return Ok(None) };
        let mut last = 0;
        while let Some(next) = next_btf(last)? {
            last = next;
            // It may have gone since.
            let Ok(types) = open_btf(next) else { continue };
            if btf_name(&types)? == module {
                return Ok(Some(Self { types, id }));
            }
        }
        Ok(None)
    }
}

/// The id of a function among a module's types, which follow those of the kernel.
fn function_id(kernel: &[u8], module: &[u8], function: &str) -> Option<u32> {
    const FUNCTION: u32 = 12;
    let (kernel, module) = (Types::of(kernel)?, Types::of(module)?);
    let before = u32::try_from(kernel.strings.len()).ok()?;
    // The id 0 is `void`, which has no record.
    let first = u32::try_from(kernel.records().count()).ok()?.checked_add(1)?;
    let is_it = |record: &Record| {
        let at = record.name.checked_sub(before).and_then(|at| usize::try_from(at).ok());
        let name = at.and_then(|at| module.strings.get(at..)).unwrap_or_default();
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        record.kind == FUNCTION && &name[..end] == function.as_bytes()
    };
    let position = module.records().position(|record| is_it(&record))?;
    first.checked_add(u32::try_from(position).ok()?)
}

/// The sections of a description (linux/btf.h, `struct btf_header`).
struct Types<'a> {
    records: &'a [u8],
    strings: &'a [u8],
}

/// A type (`struct btf_type`).
struct Record {
    /// The offset of its name among the kernel's and then the module's strings.
    name: u32,
    kind: u32,
}

impl<'a> Types<'a> {
    fn of(bytes: &'a [u8]) -> Option<Self> {
        const MAGIC: [u8; 2] = [0x9f, 0xeb];
        bytes.starts_with(&MAGIC).then_some(())?;
        let header = usize::try_from(word(bytes, 4)?).ok()?;
        let section = |offset: usize| {
            let begin = header.checked_add(usize::try_from(word(bytes, offset)?).ok()?)?;
            let end = begin.checked_add(usize::try_from(word(bytes, offset + 4)?).ok()?)?;
            bytes.get(begin..end)
        };
        Some(Self { records: section(8)?, strings: section(16)? })
    }

    /// Its types, up to the first of an unknown kind.
    fn records(&self) -> impl Iterator<Item = Record> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let (name, info) = (word(self.records, at)?, word(self.records, at + 4)?);
            let (kind, members) = (info >> 24 & 0x1f, usize::try_from(info & 0xffff).ok()?);
            at += 12
                + match kind {
                    // Pointers, forward declarations, type names and modifiers, functions, floats.
                    2 | 7..=12 | 16 | 18 => 0,
                    // Integers, variables, tags.
                    1 | 14 | 17 => 4,
                    3 => 12,
                    // Structures, unions, sections, enumerations of 64 bits.
                    4 | 5 | 15 | 19 => 12 * members,
                    // Enumerations and prototypes.
                    6 | 13 => 8 * members,
                    _ => return None,
                };
            Some(Record { name, kind })
        })
    }
}

/// The word at an offset.
fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*word))
}

#[cfg(test)]
#[path = "module_tests.rs"]
mod tests;
