use firn_base::PageRange;
use firn_memory::GuestMemory;
use firn_snapshot::{
    Contents, Description, Destination, FreezeRequest, Machine, MemoryLayout, freeze,
};
use proptest::prelude::{any, proptest};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

use super::*;

/// The layout of a guest of 4 MiB, by guest-physical address. The first 2 MiB are mapped where
/// Linux maps itself.
const DESCRIPTION: u64 = 0x1000;
const TABLES: u64 = 0x2000;
const ROOTS: u64 = 0x6000;
const SECTIONS: u64 = 0x7000;
const STRUCTS: u64 = 0x10000;
const BUDDY: u32 = 0xf000_0000;

fn description() -> String {
    format!(
        "OSRELEASE=6.12.0\nSYMBOL(swapper_pg_dir)={:x}\nNUMBER(phys_base)=0\nNUMBER(pgtable_l5_enabled)=0\n\
         SYMBOL(mem_section)={:x}\nLENGTH(mem_section)=2048\nSIZE(mem_section)=16\nOFFSET(mem_section.section_mem_map)=0\n\
         NUMBER(SECTION_SIZE_BITS)=27\nSIZE(page)=64\nOFFSET(page._mapcount)=48\nOFFSET(page.private)=40\n\
         NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)={}\nLENGTH(zone.free_area)=11\n",
        KERNEL_MAP + TABLES,
        KERNEL_MAP + ROOTS,
        i64::from(BUDDY.cast_signed()),
    )
}

struct Guest {
    memory: GuestMemory,
}

impl Guest {
    fn new(description: &str) -> Self {
        let memory = GuestMemory::anonymous(MemoryLayout::for_size(4 << 20).unwrap()).unwrap();
        let guest = Self { memory };
        guest.write(DESCRIPTION, description.as_bytes());
        guest.word(TABLES + 511 * 8, 0x3003);
        guest.word(0x3000 + 510 * 8, 0x4003);
        guest.word(0x4000, 0x83);
        guest.word(ROOTS, KERNEL_MAP + SECTIONS);
        guest.word(SECTIONS, (KERNEL_MAP + STRUCTS) | 3);
        guest
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.memory.vm_memory().write_slice(bytes, GuestAddress(address)).unwrap();
    }

    fn word(&self, address: u64, value: u64) {
        self.write(address, &value.to_le_bytes());
    }

    /// Marks a page as the start of a free block.
    fn free(&self, page: u64, order: u64) {
        self.word(STRUCTS + page * 64 + 40, order);
        self.write(STRUCTS + page * 64 + 48, &BUDDY.to_le_bytes());
    }

    fn frozen(&self) -> (TempDir, Snapshot) {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("snapshot");
        let machine = Machine {
            description: Description { vcpus: 1, ..Description::default() },
            state_version: 1,
            state: Vec::new(),
            reported: Vec::new(),
        };
        let pages = self.memory.pages();
        let destination = Destination::Directory(path.clone());
        let request = FreezeRequest { destination, dense: false, function: None };
        freeze(&mut Contents::new(&pages, machine), request).unwrap();
        let snapshot = Snapshot::open(&path).unwrap();
        (dir, snapshot)
    }

    fn found(&self) -> Result<Vec<PageRange>, FreePagesError> {
        free_pages(&self.frozen().1)
    }
}

#[test]
fn only_valid_free_blocks_are_found() {
    let guest = Guest::new(&description());
    guest.free(256, 4);
    guest.free(512, 8);
    guest.free(768, 0);
    guest.free(1023, 0);
    // Misaligned, beyond the end of memory, and of an invalid order.
    guest.free(300, 3);
    guest.free(0, 10 + 1);
    guest.free(4, u64::MAX);
    // In use, with a value in the field that holds the order of a free block.
    guest.word(STRUCTS + 900 * 64 + 40, 1);
    let run = |first, pages| PageRange { first, pages };
    assert_eq!(guest.found().unwrap(), [run(256, 16), run(512, 257), run(1023, 1)]);
}

#[test]
fn a_page_that_only_starts_like_a_vmcoreinfo_is_skipped() {
    let guest = Guest::new(&description());
    guest.write(0, b"OSRELEASE=5.10\nSIZE(page)=64\n");
    guest.free(600, 0);
    assert_eq!(guest.found().unwrap(), [PageRange { first: 600, pages: 1 }]);
}

#[test]
fn the_error_names_the_missing_field() {
    let guest = Guest::new("Linux");
    assert!(matches!(guest.found(), Err(FreePagesError::NoDescription)));
    for field in ["SIZE(page)", "SYMBOL(mem_section)", "NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)"] {
        let lacking = description().replace(&format!("{field}="), "OTHER=");
        let error = Guest::new(&lacking).found().unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
    let odd = description().replace("SIZE(page)=64", "SIZE(page)=63");
    assert!(matches!(Guest::new(&odd).found(), Err(FreePagesError::Unknown("SIZE(page)"))));
    let (roots, unmapped) = (KERNEL_MAP + ROOTS, KERNEL_MAP + (8 << 20));
    let astray = description().replace(&format!("{roots:x}"), &format!("{unmapped:x}"));
    let found = Guest::new(&astray).found();
    assert!(matches!(found, Err(FreePagesError::Outside(at)) if at == unmapped), "{found:?}");
}

/// `struct page` of 4096 bytes at an address that is no multiple of it: its fields would be beyond
/// the page that was read.
#[test]
fn structures_across_pages_are_refused() {
    let text = description()
        .replace("SIZE(page)=64", "SIZE(page)=4096")
        .replace("page._mapcount)=48", "page._mapcount)=4088");
    let guest = Guest::new(&text);
    guest.word(SECTIONS, (KERNEL_MAP + STRUCTS + 64) | 3);
    let found = guest.found();
    assert!(matches!(found, Err(FreePagesError::Outside(_))), "{found:?}");
}

/// Most pages of the guest are a vmcoreinfo, and each of them leads nowhere only at the last pages
/// of guest memory. Each alone takes fewer steps than the limit.
#[test]
fn the_steps_that_metadata_takes_are_limited() {
    let text = description().replace("BITS)=27", "BITS)=12");
    let guest = Guest::new(&text);
    for root in 1..3 {
        guest.word(ROOTS + 8 * root, KERNEL_MAP + SECTIONS);
    }
    guest.word(ROOTS + 8 * 3, KERNEL_MAP + (8 << 20));
    let found = guest.found();
    assert!(matches!(found, Err(FreePagesError::Outside(_))), "{found:?}");
    for page in 0x100..0x400 {
        guest.write(page << 12, text.as_bytes());
    }
    let found = guest.found();
    let limit = 1024 * STEPS_PER_PAGE + MORE_STEPS;
    assert!(matches!(found, Err(FreePagesError::TooLong(of)) if of == limit), "{found:?}");
}

proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(48))]
    #[test]
    fn random_metadata_never_panics(
        words in proptest::collection::vec((0..0x11000u64 / 8, any::<u64>()), 0..40),
        numbers in proptest::collection::vec(any::<u32>(), 6),
    ) {
        let mut text = description();
        for (field, number) in ["SIZE(page)=64", "SIZE(mem_section)=16", "BITS)=27", "page.private)=40", "LENGTH(zone.free_area)=11", "phys_base)=0"].iter().zip(numbers) {
            let (name, value) = field.split_once('=').unwrap();
            if number % 4 == 0 {
                text = text.replace(&format!("{name}={value}"), &format!("{name}={number}"));
            }
        }
        let guest = Guest::new(&text);
        for (at, value) in words.into_iter().filter(|(at, _)| *at >= 0x2000 / 8) {
            guest.word(at * 8, value);
        }
        if let Ok(free) = guest.found() {
            assert!(free.iter().all(|run| run.range().end <= 1024));
        }
    }
}
