use super::*;

/// A description of these records, each with its name's offset, kind and number of members, and of
/// these strings.
fn types(records: &[(u32, u32, u32)], strings: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, kind, members) in records {
        let extra = match kind {
            1 => 1,
            4 => 3 * members,
            13 => 2 * members,
            _ => 0,
        };
        let words = [*name, kind << 24 | members, 0];
        let words = words.into_iter().chain((0..extra).map(|_| 0));
        body.extend(words.flat_map(u32::to_le_bytes));
    }
    let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap();
    let header = [0x0001_eb9f, 24, 0, len(&body), len(&body), len(strings)];
    let mut all: Vec<u8> = header.into_iter().flat_map(u32::to_le_bytes).collect();
    all.extend(body);
    all.extend(strings);
    all
}

#[test]
fn the_ids_of_a_modules_types_follow_the_kernels() {
    // int; a structure of two members; a prototype of one parameter.
    let kernel = types(&[(1, 1, 0), (5, 4, 2), (0, 13, 1)], b"\0int\0pair\0");
    // A pointer, whose name is the kernel's, and two functions.
    let module = types(&[(1, 2, 0), (10, 12, 0), (16, 12, 0)], b"other\0read_it\0");
    assert_eq!(function_id(&kernel, &module, "read_it"), Some(6));
    assert_eq!(function_id(&kernel, &module, "other"), Some(5));
    assert_eq!(function_id(&kernel, &module, "int"), None);
    assert_eq!(function_id(&kernel, &kernel[..30], "int"), None);
    assert_eq!(function_id(b"", &module, "other"), None);
    let unknown = types(&[(10, 31, 0), (10, 12, 0)], b"other\0");
    assert_eq!(function_id(&kernel, &unknown, "other"), None, "its size is not known");
}

#[test]
fn a_module_that_is_not_inserted_has_no_function() {
    assert!(ModuleFunction::find("firn_no_such_module", "read_it").unwrap().is_none());
}
