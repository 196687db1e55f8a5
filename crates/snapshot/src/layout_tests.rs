use firn_base::PAGE_SIZE;
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

use super::{CHUNK_SIZE, ImageRegion, LayoutError, MAX_MEMORY, MemoryLayout, MemoryRegion};

const GIB: u64 = 1 << 30;

fn region(guest_addr: u64, len: u64) -> MemoryRegion {
    MemoryRegion { guest_addr, len }
}

#[test]
fn a_small_guest_has_one_region() {
    let layout = MemoryLayout::for_size(256 << 20).unwrap();
    let expected = ImageRegion { guest_addr: 0, len: 256 << 20, image_offset: 0 };
    assert_eq!(layout.regions().collect::<Vec<_>>(), [expected]);
    assert_eq!(layout.pages(), 65_536);
    assert_eq!(layout.chunks(), 128);
}

#[test]
fn large_guest_leaves_the_device_gap() {
    let layout = MemoryLayout::for_size(5 * GIB).unwrap();
    let expected = [
        ImageRegion { guest_addr: 0, len: 3 * GIB, image_offset: 0 },
        ImageRegion { guest_addr: 4 * GIB, len: 2 * GIB, image_offset: 3 * GIB },
    ];
    assert_eq!(layout.regions().collect::<Vec<_>>(), expected);
    assert_eq!(layout.total_bytes(), 5 * GIB);
    assert_eq!(layout.image_offset(3 * GIB - 1), Some(3 * GIB - 1));
    assert_eq!(layout.image_offset(3 * GIB), None);
    assert_eq!(layout.image_offset(4 * GIB + 5), Some(3 * GIB + 5));
    assert_eq!(layout.guest_addr(3 * GIB), Some(4 * GIB));
    assert_eq!(layout.guest_addr(5 * GIB), None);
    assert_eq!(MemoryLayout::for_size(3 * GIB).unwrap().regions().count(), 1);
}

#[test]
fn last_chunk_may_be_short() {
    assert_eq!(MemoryLayout::for_size(CHUNK_SIZE + PAGE_SIZE).unwrap().chunks(), 2);
    assert_eq!(MemoryLayout::for_size(PAGE_SIZE).unwrap().chunks(), 1);
}

#[test]
fn invalid_sizes_are_refused() {
    assert_eq!(MemoryLayout::for_size(0), Err(LayoutError::Empty));
    assert_eq!(MemoryLayout::for_size(4097), Err(LayoutError::SizeNotPageAligned(4097)));
    let too_large = MAX_MEMORY + PAGE_SIZE;
    assert_eq!(MemoryLayout::for_size(too_large), Err(LayoutError::TooLarge(too_large)));
    assert!(MemoryLayout::for_size(MAX_MEMORY).is_ok());
}

#[test]
fn invalid_region_lists_are_refused() {
    let bad = |guest_addr, len| Err(LayoutError::BadRegion { guest_addr, len });
    assert_eq!(MemoryLayout::new(vec![]), Err(LayoutError::Empty));
    assert_eq!(MemoryLayout::new(vec![region(0, 0)]), bad(0, 0));
    assert_eq!(MemoryLayout::new(vec![region(1, 4096)]), bad(1, 4096));
    assert_eq!(MemoryLayout::new(vec![region(0, 4095)]), bad(0, 4095));
    let top = u64::MAX - 4095;
    assert_eq!(MemoryLayout::new(vec![region(top, 8192)]), bad(top, 8192));
    assert_eq!(
        MemoryLayout::new(vec![region(0, 8192), region(4096, 4096)]),
        Err(LayoutError::NotAscending { guest_addr: 4096, previous_end: 8192 })
    );
    let many = (0..65).map(|i| region(i * 8192, 4096)).collect();
    assert_eq!(MemoryLayout::new(many), Err(LayoutError::TooManyRegions(65)));
    let halves = vec![region(0, MAX_MEMORY), region(MAX_MEMORY, 4096)];
    assert_eq!(MemoryLayout::new(halves), Err(LayoutError::TooLarge(MAX_MEMORY + 4096)));
}

#[test]
fn decoding_checks_the_regions() {
    let good = MemoryLayout::for_size(4 * GIB).unwrap();
    let bytes = postcard::to_stdvec(&good).unwrap();
    assert_eq!(postcard::from_bytes::<MemoryLayout>(&bytes), Ok(good));
    let bad = postcard::to_stdvec(&vec![region(0, 1)]).unwrap();
    assert!(postcard::from_bytes::<MemoryLayout>(&bad).is_err());
}

proptest! {
    #[test]
    fn any_regions_are_refused_or_convert_both_ways(
        pages in proptest::collection::vec((any::<u32>(), 0_u64..64), 1..6),
    ) {
        let mut regions: Vec<_> = pages
            .iter()
            .map(|&(start, len)| region(u64::from(start) * PAGE_SIZE, len * PAGE_SIZE))
            .collect();
        regions.sort_by_key(|region| region.guest_addr);
        let Ok(layout) = MemoryLayout::new(regions) else { return Ok(()) };
        for offset in (0..layout.total_bytes()).step_by(1024) {
            let addr = layout.guest_addr(offset).unwrap();
            prop_assert_eq!(layout.image_offset(addr), Some(offset));
        }
        prop_assert!(layout.guest_addr(layout.total_bytes()).is_none());
    }
}
