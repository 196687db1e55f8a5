use super::{format_bytes, parse_size};

#[test]
fn sizes_have_units() {
    assert_eq!(parse_size("4096"), Ok(4096));
    assert_eq!(parse_size("256M"), Ok(256 << 20));
    assert_eq!(parse_size("2GiB"), Ok(2 << 30));
    assert_eq!(parse_size("1k"), Ok(1024));
    assert_eq!(parse_size("0"), Ok(0));
    assert_eq!(parse_size("3kb"), Ok(3072));
    assert_eq!(parse_size("7B"), Ok(7));
}

#[test]
fn invalid_sizes_are_refused() {
    for text in ["", "M", "-1", "1.5G", "12X", "99999999999G", " 1M", "1 M", "1_000"] {
        assert!(parse_size(text).is_err(), "{text}");
    }
}

#[test]
fn sizes_are_formatted_in_the_largest_unit() {
    assert_eq!(format_bytes(1023), "1023 B");
    assert_eq!(format_bytes(1536), "1.5 KiB");
    assert_eq!(format_bytes(1 << 20), "1.0 MiB");
    assert_eq!(format_bytes(5 << 30), "5.0 GiB");
    assert_eq!(format_bytes(u64::MAX), "17179869183.9 GiB");
}
