use super::{bytes, escaped, milliseconds, plain, table};

#[test]
fn units_are_readable() {
    assert_eq!(milliseconds(0), "0.0 ms");
    assert_eq!(milliseconds(1_250_000), "1.2 ms");
    assert_eq!(milliseconds(1_234_000_000), "1234 ms");
    assert_eq!(bytes(1023), "1023 B");
    assert_eq!(bytes(1536), "1.5 KiB");
    assert_eq!(bytes(1 << 20), "1.0 MiB");
    assert_eq!(bytes(5 << 30), "5.0 GiB");
    assert_eq!(bytes(u64::MAX), "17179869183.9 GiB");
}

#[test]
fn tables_hold_every_cell() {
    let text = table(&["what", "value"], &[vec!["a".into(), "1".into()]]);
    for cell in ["what", "value", "a", "1"] {
        assert!(text.contains(cell), "{text}");
    }
}

#[test]
fn control_characters_do_not_get_through() {
    assert_eq!(plain("a\u{1b}[2J\u{7}\r\u{9b}1m\u{7f}b\tc\nd\u{e9}"), "a[2J1mb\tc\nd\u{e9}");
}

#[test]
fn json_keeps_its_meaning_without_control_characters() {
    for text in ["{\"a\":\"\u{9b}31m\u{7f}ä\\n\"}", "[1,\r\n2]\r"] {
        let shown = escaped(text);
        assert!(!shown.contains(|c: char| c.is_control() && c != '\n'), "{shown:?}");
        let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(value(&shown), value(text));
    }
}
