use super::*;

const INT: u32 = 1;
const PTR: u32 = 2;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const FUNC: u32 = 12;
const FUNC_PROTO: u32 = 13;

/// A description of types in the format of the kernel (Documentation/bpf/btf.rst). Types are
/// numbered from 1.
struct Description {
    types: Vec<u32>,
    names: Vec<u8>,
}

impl Description {
    fn name(&mut self, name: &str) -> u32 {
        let at = u32::try_from(self.names.len()).unwrap();
        self.names.extend(name.bytes().chain([0]));
        if name.is_empty() { 0 } else { at }
    }

    /// `size` is the size or the type's number, depending on the kind. Each member has a name and
    /// one or two numbers.
    fn add(&mut self, kind: u32, name: &str, size: u32, members: &[(&str, &[u32])]) {
        let vlen = u32::try_from(members.len()).unwrap();
        let record = [self.name(name), kind << 24 | vlen, size];
        self.types.extend(record);
        for (name, numbers) in members {
            let name = self.name(name);
            self.types.push(name);
            self.types.extend(*numbers);
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let types: Vec<u8> = self.types.iter().flat_map(|word| word.to_le_bytes()).collect();
        let [length, names] =
            [types.len(), self.names.len()].map(|len| u32::try_from(len).unwrap());
        let header = [0x0001_eb9f, 24, 0, length, length, names];
        let header = header.into_iter().flat_map(u32::to_le_bytes);
        header.chain(types).chain(self.names.iter().copied()).collect()
    }
}

/// A kernel with these arguments of the function and this name of the field with a folio's order.
fn kernel(arguments: [&str; 4], order: &str) -> Vec<u8> {
    let mut kernel = Description { types: Vec::new(), names: vec![0] };
    kernel.add(INT, "unsigned long", 8, &[]);
    kernel.types.push(64);
    kernel.add(PTR, "", 4, &[]);
    // 3: a typedef with the name of a structure.
    kernel.add(ENUM, "folio", 4, &[("SOMETHING", &[5])]);
    kernel.add(STRUCT, "address_space", 16, &[("host", &[6, 0]), ("a_ops", &[2, 64])]);
    kernel.add(STRUCT, "super_block", 24, &[("s_list", &[1, 0]), ("s_dev", &[1, 128])]);
    kernel.add(
        STRUCT,
        "inode",
        24,
        &[("i_mode", &[1, 0]), ("i_sb", &[2, 64]), ("i_ino", &[1, 128])],
    );
    kernel.add(STRUCT, "", 16, &[("flags", &[1, 0]), ("index", &[1, 64])]);
    kernel.add(UNION, "", 16, &[("", &[7, 0]), ("page", &[7, 0])]);
    kernel.add(STRUCT, "folio", 32, &[("", &[8, 0]), ("other", &[1, 128]), (order, &[1, 192])]);
    kernel.add(ENUM, "pageflags", 4, &[("PG_locked", &[0]), ("PG_head", &[6])]);
    kernel.add(FUNC_PROTO, "", 1, &arguments.map(|argument| (argument, &[1][..])));
    kernel.add(FUNC, "filemap_add_folio", 11, &[]);
    kernel.bytes()
}

#[test]
fn offsets_are_read_from_the_description() {
    let expected = AddFolio {
        id: 12,
        inode: 0,
        number: 16,
        superblock: 8,
        device: 16,
        flags: 0,
        large: 6,
        order: 24,
    };
    for order in ["_flags_1", "_folio_order"] {
        assert_eq!(AddFolio::of(kernel(ARGUMENTS, order)), Some(expected.clone()), "{order}");
    }
}

#[test]
fn a_different_function_or_folio_is_refused() {
    assert_eq!(AddFolio::of(kernel(["folio", "mapping", "index", "gfp"], "_flags_1")), None);
    assert_eq!(AddFolio::of(kernel(ARGUMENTS, "_order")), None);
    let whole = kernel(ARGUMENTS, "_flags_1");
    for end in 0..whole.len() {
        assert_eq!(AddFolio::of(whole[..end].to_vec()), None, "the first {end} bytes");
    }
}
