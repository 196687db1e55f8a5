use serde_json::Value;

use super::*;

#[test]
fn a_report_is_json_in_printable_ascii() {
    let reason = "KeyError: 'größe' 😀 \u{7f} \n \"";
    let report =
        InvocationReport { reason: Some(reason.to_owned()), ..InvocationReport::default() };
    let json = report.json();
    assert!(json.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{json}");
    let read: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(read["reason"], reason);
}
