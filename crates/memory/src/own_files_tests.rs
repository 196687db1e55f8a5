use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::*;

#[test]
fn each_read_has_the_present_text() {
    let files = OwnFiles::of_process();
    let mappings = || files.smaps().unwrap().lines().filter(|l| l.starts_with("Rss:")).count();
    let before = mappings();
    // Each has a neighbour of other rights, so the kernel merges none.
    let page = 4096;
    let all = (0..2000).map(|number| {
        let rights = if number % 2 == 0 { ProtFlags::READ } else { ProtFlags::empty() };
        // SAFETY: new memory, which nothing uses.
        unsafe { mmap_anonymous(std::ptr::null_mut(), page, rights, MapFlags::PRIVATE) }.unwrap()
    });
    let all: Vec<_> = all.collect();
    assert!(files.smaps().unwrap().len() > FIRST_READ, "more than one read");
    assert!(mappings() >= before + 1000, "{before} {}", mappings());
    for address in all {
        // SAFETY: as above.
        unsafe { munmap(address, page) }.unwrap();
    }
    let status = files.status().unwrap();
    assert_eq!(u32::try_from(status.pid).unwrap(), std::process::id());
}
