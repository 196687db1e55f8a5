use super::{escaped, plain, table};

#[test]
fn tables_contain_every_cell() {
    let text = table(&["what", "value"], &[vec!["a".into(), "1".into()]]);
    for cell in ["what", "value", "a", "1"] {
        assert!(text.contains(cell), "{text}");
    }
}

#[test]
fn control_characters_are_removed() {
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
