//! Sealed guest memory for tests, as over devdax.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use firn_memory::planners::{ExtentFacts, ImageFacts, PlanInput, parse};
use firn_memory::{GuestMemory, HostFacts, Leaf, Sources, execute};
use firn_snapshot::{MemoryLayout, PageSet};

/// A sealed extent: an image in a file that is open read-only.
pub(crate) struct Sealed {
    medium: File,
    image: Vec<u8>,
}

impl Sealed {
    pub(crate) fn new(image: Vec<u8>) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&image, 0).unwrap();
        let medium = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        Self { medium, image }
    }

    /// Guest memory of another VM that shares the extent.
    pub(crate) fn share(&self) -> GuestMemory {
        let size = u64::try_from(self.image.len()).unwrap();
        let layout = MemoryLayout::for_size(size).unwrap();
        let (offset, leaf) = (0, Leaf::Size4K);
        let facts = ExtentFacts { offset, leaf, private: false, replica: false, checked: true };
        let input = PlanInput {
            layout: &layout,
            image: ImageFacts::in_pool(size, facts),
            zero_map: &PageSet::new(layout.pages()),
            profile: None,
            snapshot: None,
            copies: None,
            host: &HostFacts::read().unwrap(),
        };
        let plan = parse("pass_shared").unwrap().plan(&input).unwrap();
        execute(&plan, &Sources::medium(&self.medium)).unwrap().memory
    }

    /// Checks that no byte has changed.
    pub(crate) fn check(&self) {
        let mut now = vec![0; self.image.len()];
        self.medium.read_exact_at(&mut now, 0).unwrap();
        assert!(now == self.image, "the sealed bytes have changed");
    }
}
