use std::os::unix::fs::FileExt;

use firn_required::has;

use super::*;

const IOMEM: &str = "\
00000000-00000fff : Reserved
00001000-0009ffff : System RAM
00100000-0fffffff : System RAM
  01000000-01dfffff : Kernel code
  01e00000-0228dfff : Kernel rodata
d0000000-d0000fff : LNRO0005:00
";

#[test]
fn memory_and_the_image_are_found() {
    let place = |name: &str, pages| Place { name: name.to_owned(), pages };
    let image = vec![place(CODE, 0x1000..0x1e00), place("kernel: rodata", 0x1e00..0x228e)];
    assert_eq!(places(IOMEM), (0x10000, image));
}

#[test]
fn resident_mappings_are_found_with_their_paths() {
    let smaps = "\
55d0c0000000-55d0c0002000 r-xp 00001000 fe:00 77                         /usr/lib/a file.so
Size:                  8 kB
Rss:                   8 kB
Pss:                   4 kB
55d0c1000000-55d0c1001000 rw-p 00000000 00:00 0                          [heap]
Rss:                   4 kB
7f0000000000-7f8000000000 ---p 00000000 00:00 0 
Rss:                   0 kB
7f8000000000-7f8000001000 rw-p 00000000 00:00 0 
Rss:                   4 kB
";
    let expected = [
        (0x55d0c0000..0x55d0c0002, "/usr/lib/a file.so"),
        (0x55d0c1000..0x55d0c1001, "heap"),
        (0x7f8000000..0x7f8000001, "anonymous"),
    ];
    assert_eq!(resident(smaps), expected);
}

#[test]
fn symbols_are_functions_and_variables_after_the_images_begin() {
    let (_, image) = places(IOMEM);
    let kallsyms = "\
0000000000000000 A fixed_percpu_data
ffffffff99000000 T _text
ffffffff99000020 t last
ffffffff99000010 t __pfx_first
ffffffff99000018 T first
ffffffff99002810 r a_constant
ffffffff99e00000 D variable
ffffffffc0001000 t of_a_module\t[module]
";
    let kernel = symbols(kallsyms, &image).unwrap();
    assert_eq!((kernel.text, kernel.page), (0xffff_ffff_9900_0000, 0x1000));
    let expected = [
        (0, "_text"),
        (0x18, "first"),
        (0x20, "last"),
        (0xe0_0000, "variable"),
        (0x2700_1000, "of_a_module [module]"),
    ];
    assert_eq!(kernel.symbols, expected.map(|(at, name)| (at, name.to_owned())));
    assert_eq!(symbols(&kallsyms.replace("ffffffff99", "0000000000"), &image), None);
}

/// This machine's own memory.
#[test]
fn the_pages_of_this_process_are_its_own() {
    if !has("root", rustix::process::geteuid().is_root()) {
        return;
    }
    // Larger than what the allocator has already.
    let memory = vec![1_u8; 64 << 20];
    let inside = memory.as_ptr() as u64 / PAGE_SIZE + 1000;
    let pages = read(Path::new("/proc")).unwrap();
    let mut entry = [0; 8];
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entry, inside * 8).unwrap();
    let frame = u64::from_ne_bytes(entry) & ((1 << 55) - 1);
    let holder = |page: u64| {
        let mut end = 0;
        let run = pages.runs.iter().find(|(_, pages)| {
            end += pages;
            page < end
        });
        pages.holders[run.unwrap().0 as usize].as_str()
    };
    let process = fs::read_to_string("/proc/self/comm").unwrap();
    assert_eq!(holder(frame), format!("{}: anonymous", process.trim_end()));
    let (end, image) = places(&fs::read_to_string("/proc/iomem").unwrap());
    assert_eq!(pages.runs.iter().map(|(_, pages)| pages).sum::<u64>(), end);
    let code = image.iter().find(|place| place.name == CODE).unwrap();
    assert_eq!(holder(code.pages.start), CODE);
    let kernel = pages.kernel.unwrap();
    assert_eq!(kernel.page, code.pages.start);
    let size = (code.pages.end - code.pages.start) * PAGE_SIZE;
    let functions = kernel.symbols.iter().filter(|(at, _)| *at < size).count();
    assert!(functions > 10_000, "{functions}");
    drop(memory);
}
