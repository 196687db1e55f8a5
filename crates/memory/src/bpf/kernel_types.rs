//! The offsets that a program at the kernel's function `filemap_add_folio` reads from, which differ
//! between kernels. They come from the kernel's own description of its types (BTF).

use btfparse::{Integer32Value, Offset, Readable, TypeInformation, TypeVariant};

const KERNEL: &str = "/sys/kernel/btf/vmlinux";
/// `int filemap_add_folio(struct address_space *mapping, struct folio *folio, pgoff_t index, gfp_t
/// gfp)`, of every kernel since 5.16. The program's context holds the arguments and then the
/// result, 8 bytes each.
const FUNCTION: &str = "filemap_add_folio";
const ARGUMENTS: [&str; 4] = ["mapping", "folio", "index", "gfp"];

/// The function, and offsets in bytes of fields that are reached from its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AddFolio {
    /// Its BTF id.
    pub(super) id: u32,
    /// `address_space.host`, the inode.
    pub(super) inode: i16,
    /// `inode.i_ino`.
    pub(super) number: i16,
    /// `inode.i_sb`.
    pub(super) superblock: i16,
    /// `super_block.s_dev`.
    pub(super) device: i16,
    /// `folio.flags`.
    pub(super) flags: i16,
    /// The bit of the flags that is set for a folio of several pages.
    pub(super) large: i32,
    /// The byte of such a folio that holds its order.
    pub(super) order: i16,
}

impl AddFolio {
    pub(super) const MAPPING: i16 = 0;
    pub(super) const FOLIO: i16 = 8;
    pub(super) const INDEX: i16 = 16;
    pub(super) const RETURNED: i16 = 32;

    /// Those of the running kernel; `None` where it has no BTF, or a different function.
    pub(super) fn find() -> Option<Self> {
        Self::of(std::fs::read(KERNEL).ok()?)
    }

    fn of(description: Vec<u8>) -> Option<Self> {
        let types = TypeInformation::new(&Bytes(description)).ok()?;
        let (id, prototype) = types.get().iter().find_map(|(id, found)| match found {
            TypeVariant::Func(function) => {
                named(function.name(), FUNCTION).then_some((*id, *function.prototype_tid()))
            }
            _ => None,
        })?;
        let Some(TypeVariant::FuncProto(prototype)) = types.from_id(prototype) else { return None };
        let arguments = prototype.parameter_list().iter();
        if arguments.len() != ARGUMENTS.len()
            || !arguments.zip(ARGUMENTS).all(|(argument, name)| named(&argument.name(), name))
        {
            return None;
        }
        let offset = |structure: &str, field: &str| {
            let id = types.get().iter().find_map(|(id, found)| match found {
                TypeVariant::Struct(found) => named(found.name(), structure).then_some(*id),
                _ => None,
            })?;
            match types.offset_of(id, field) {
                Ok((_, Offset::ByteOffset(offset))) => i16::try_from(offset).ok(),
                _ => None,
            }
        };
        let large = types.get().values().find_map(|found| {
            let TypeVariant::Enum(flags) = found else { return None };
            let large = flags.named_value_list().iter().find(|value| value.name == "PG_head")?;
            match large.value {
                Integer32Value::Signed(bit) => Some(bit),
                Integer32Value::Unsigned(bit) => i32::try_from(bit).ok(),
            }
        });
        Some(Self {
            id,
            inode: offset("address_space", "host")?,
            number: offset("inode", "i_ino")?,
            superblock: offset("inode", "i_sb")?,
            device: offset("super_block", "s_dev")?,
            flags: offset("folio", "flags")?,
            large: large.filter(|bit| (0..64).contains(bit))?,
            // Since 6.6 the order is the lowest byte of the second page's flags.
            order: offset("folio", "_folio_order").or_else(|| offset("folio", "_flags_1"))?,
        })
    }
}

fn named(name: &Option<String>, expected: &str) -> bool {
    name.as_deref() == Some(expected)
}

struct Bytes(Vec<u8>);

impl Readable for Bytes {
    fn read(&self, offset: u64, buffer: &mut [u8]) -> btfparse::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..));
        let from = from.and_then(|from| from.get(..buffer.len()));
        buffer
            .copy_from_slice(from.ok_or(std::io::Error::from(std::io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }
}

#[cfg(test)]
#[path = "kernel_types_tests.rs"]
mod tests;
