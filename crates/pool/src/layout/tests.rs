use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
use uuid::Uuid;

use super::record::RECORD_BYTES;
use super::superblock::SUPERBLOCK_BYTES;
use super::{
    Entry, FREE, GRANULE, Kind, NameBody, Record, Superblock, SuperblockError, Word, encode_name,
};

fn superblock() -> Superblock {
    Superblock {
        uuid: Uuid::from_u128(7),
        size: 64 << 20,
        granule: GRANULE,
        names: 100,
        longest_name: 112,
        created: 1_700_000_000,
        classes: vec![GRANULE, 1 << 30],
        scrub: false,
    }
}

const RECORD: Record = Record {
    kind: Kind::Replica,
    slot: 3,
    guest_bytes: 128 << 20,
    tail_bytes: 5000,
    generation: 1 << 40,
    created: 9,
    source: 8,
};

#[test]
fn encoding_matches_the_documentation() {
    let block = superblock().encode();
    assert_eq!(&block[..12], b"FIRNPOOL\x01\0\0\0");
    assert_eq!(block[31], 7, "uuid");
    assert_eq!(&block[32..40], (64_u64 << 20).to_le_bytes());
    assert_eq!(&block[40..48], GRANULE.to_le_bytes());
    assert_eq!(&block[48..56], [100, 0, 0, 0, 112, 0, 0, 0]);
    assert_eq!(&block[56..64], 1_700_000_000_u64.to_le_bytes());
    assert_eq!(&block[64..72], GRANULE.to_le_bytes());
    assert_eq!(&block[72..80], (1_u64 << 30).to_le_bytes());
    assert!(block[80..252].iter().all(|byte| *byte == 0));
    assert_eq!(Superblock::decode(&block), Ok(superblock()));

    let scrubbed = Superblock { scrub: true, ..superblock() };
    let mut block = scrubbed.encode();
    assert_eq!(&block[..16], b"FIRNPOOL\x02\0\0\0\x01\0\0\0");
    assert_eq!(Superblock::decode(&block), Ok(scrubbed));
    // A flag that a later firn may have.
    block[12] = 3;
    let crc = crc32fast::hash(&block[..252]);
    block[252..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(Superblock::decode(&block), Err(SuperblockError::Inconsistent));

    let line = RECORD.encode(Uuid::nil(), 5);
    assert_eq!(&line[8..16], (128_u64 << 20).to_le_bytes());
    assert_eq!(&line[16..24], 5000_u64.to_le_bytes());
    assert_eq!(&line[24..32], (1_u64 << 40).to_le_bytes());
    assert_eq!(&line[32..48], [9, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&line[48..56], [3, 0, 0, 0, 2, 0, 0, 0]);
    assert_eq!(Record::decode(&line, Uuid::nil(), 5), Some(RECORD));

    let word = Word::available(0x1234_5678, 0xff00_0003);
    assert_eq!(word.encode(), 0x0000_0302_1234_5678);
    assert!(word.refers_to(0x1234_5678, 0x3) && !word.refers_to(0x1234_5678, 4));
    assert_eq!(Word::Removed.encode(), 1 << 32);
    assert_eq!(Word::Empty.encode(), 0);
    assert_eq!(encode_name("ice")[8..], *b"ice");
}

#[test]
fn parts_are_laid_out_in_sequence() {
    let superblock = superblock();
    assert_eq!((superblock.slots(), superblock.stride()), (134, 128));
    assert_eq!(superblock.slot_at(0), 4096);
    assert_eq!(superblock.record_at(0), 4096 + 134 * 128);
    assert_eq!(superblock.metadata_end(), superblock.record_at(0) + 32 * 64);
    assert_eq!(superblock.data(), Some(1..31));
    assert_eq!(superblock.twin_at(), (64 << 20) - 4096);
    assert_eq!(superblock.alignment(4096), GRANULE);
    assert_eq!(superblock.alignment(1 << 30), 1 << 30);
}

#[test]
fn superblock_of_another_version_or_with_invalid_values_is_refused() {
    let recode = |change: &dyn Fn(&mut [u8; SUPERBLOCK_BYTES])| {
        let mut block = superblock().encode();
        change(&mut block);
        let crc = crc32fast::hash(&block[..252]);
        block[252..].copy_from_slice(&crc.to_le_bytes());
        Superblock::decode(&block)
    };
    assert_eq!(recode(&|block| block[8] = 3), Err(SuperblockError::Version(3)));
    assert_eq!(recode(&|block| block[0] = 0), Err(SuperblockError::Magic));
    // A medium of two granules has room only for the metadata and the twin.
    let numbers: [(usize, u64); 6] =
        [(32, 4 << 20), (32, u64::MAX), (40, 0), (40, 3 << 20), (48, 0), (64, GRANULE + 4096)];
    for (at, value) in numbers {
        let refused = recode(&|block| block[at..at + 8].copy_from_slice(&value.to_le_bytes()));
        assert_eq!(refused, Err(SuperblockError::Inconsistent), "{at} {value}");
    }
}

proptest! {
    #[test]
    fn changed_byte_is_detected(at in 0..SUPERBLOCK_BYTES, change in 1_u8..) {
        let mut block = superblock().encode();
        block[at] ^= change;
        prop_assert!(Superblock::decode(&block).is_err());
        let mut line = RECORD.encode(Uuid::nil(), 5);
        line[at % RECORD_BYTES] ^= change;
        prop_assert_eq!(Record::decode(&line, Uuid::nil(), 5), None);
    }

    #[test]
    fn random_bytes_are_invalid(bytes in proptest::collection::vec(any::<u8>(), 256), granule: u32) {
        let block: [u8; SUPERBLOCK_BYTES] = bytes[..256].try_into().unwrap();
        prop_assert!(Superblock::decode(&block).is_err());
        let line: [u8; RECORD_BYTES] = bytes[..64].try_into().unwrap();
        prop_assert_eq!(Record::decode(&line, Uuid::nil(), granule), None);
        prop_assert_eq!(Entry::decode(&bytes[..128]).name, NameBody::Damaged);
    }

    #[test]
    fn words_and_names_round_trip(granule: u32, generation: u64, name in "\\PC{1,28}") {
        let word = Word::available(granule, generation);
        prop_assert!(word.refers_to(granule, generation));
        prop_assert!(word.encode() != FREE);
        let mut slot = word.encode().to_le_bytes().to_vec();
        slot.extend(encode_name(&name));
        slot.resize(256, 0xee);
        prop_assert_eq!(Entry::decode(&slot), Entry { word: Some(word), name: NameBody::Name(name) });
    }
}
