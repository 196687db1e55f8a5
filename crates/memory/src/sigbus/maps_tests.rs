use std::os::unix::ffi::OsStrExt;

use proptest::prelude::{any, proptest};

use super::{Mapped, OwnFiles, parse, scan};

#[test]
fn lines_of_the_kernel_are_parsed() {
    let line = b"7f0000200000-7f0000400000 rw-s 00a00000 00:05 257      /dev/dax0.0";
    let (start, end) = (0x7f00_0020_0000, 0x7f00_0040_0000);
    let (offset, inode) = (0xa0_0000, 257);
    assert_eq!(parse(line), Some(Mapped { start, end, offset, inode, path: b"/dev/dax0.0" }));
    let line = b"7f0000200000-7f0000400000 rw-p 00000000 00:00 0 ";
    assert_eq!(parse(line), Some(Mapped { start, end, offset: 0, inode: 0, path: b"" }));
    let line = b"7ffc0000-7ffd0000 rw-p 00000000 00:00 0                          [stack]";
    assert_eq!(parse(line).unwrap().path, b"");
    assert_eq!(parse(b"7f0000200000-7f0000400000 rw-p"), None);
}

#[test]
fn the_mapping_of_this_program_is_visited() {
    let here = the_mapping_of_this_program_is_visited as fn() as usize as u64;
    OwnFiles::of_process();
    let mut found = Vec::new();
    scan(|mapped| {
        if (mapped.start..mapped.end).contains(&here) {
            found = mapped.path.to_vec();
        }
        false
    })
    .unwrap();
    assert_eq!(found, std::env::current_exe().unwrap().as_os_str().as_bytes());
}

proptest! {
    #[test]
    fn any_line_is_parsed_or_skipped(line in proptest::collection::vec(any::<u8>(), 0..100)) {
        let _ = parse(&line);
    }
}
