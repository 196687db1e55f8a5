use super::parse;

#[test]
fn sizes_have_units() {
    assert_eq!(parse("4096"), Ok(4096));
    assert_eq!(parse("256M"), Ok(256 << 20));
    assert_eq!(parse("2GiB"), Ok(2 << 30));
    assert_eq!(parse("1k"), Ok(1024));
    assert_eq!(parse("0"), Ok(0));
}

#[test]
fn nonsense_is_named() {
    for text in ["", "M", "-1", "1.5G", "12X", "99999999999G"] {
        assert!(parse(text).is_err(), "{text}");
    }
}
