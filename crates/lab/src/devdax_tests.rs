use std::os::unix::fs::FileExt;

use super::{BLOCK_OFFSET, CHECKSUM, Mode, format, info_block, is_formatted};

const SIZE: u64 = 64 << 20;

fn uuid() -> [u8; 16] {
    std::array::from_fn(|index| u8::try_from(index).unwrap())
}

#[test]
fn the_block_has_the_form_that_the_kernel_accepts() {
    // The fields from the UUID on and the checksum, as in a block that Linux 6.12 accepts for a
    // devdax namespace.
    let block = info_block(SIZE, uuid(), Mode::Devdax);
    let fields = [
        0x0000_0000_0000_0000_u64, // the parent's UUID
        0x0000_0000_0000_0000,
        0x0004_0001_0000_0000, // flags, version 1.4
        0x0000_0000_0020_0000, // offset of the data
        0x0000_0000_0000_3e00, // pages
        0x0000_0000_0000_0001, // mode, start pad
        0x0020_0000_0000_0000, // end truncation, alignment
        0x0000_0040_0000_1000, // page size, size of a page's descriptor
    ];
    assert_eq!(block[..16], *b"NVDIMM_DAX_INFO\0");
    assert_eq!(block[16..32], uuid());
    for (at, field) in fields.into_iter().enumerate() {
        assert_eq!(block[32 + at * 8..][..8], field.to_le_bytes(), "field {at}");
    }
    assert!(block[96..CHECKSUM].iter().all(|byte| *byte == 0));
    assert_eq!(block[CHECKSUM..], [0x84, 0xac, 0xb6, 0xfb, 0xd0, 0x4a, 0x48, 0x23]);
}

#[test]
fn a_formatted_file_is_recognised_and_a_damaged_or_foreign_one_is_not() {
    let file = tempfile::tempfile().unwrap();
    assert!(!is_formatted(&file).unwrap(), "an empty file");
    file.set_len(SIZE).unwrap();
    assert!(!is_formatted(&file).unwrap(), "a file of zeros");
    format(&file, SIZE, uuid(), Mode::Devdax).unwrap();
    assert!(is_formatted(&file).unwrap());
    assert_eq!(file.metadata().unwrap().len(), SIZE);
    file.write_all_at(&[1], BLOCK_OFFSET + 200).unwrap();
    assert!(!is_formatted(&file).unwrap(), "a damaged block");
}
