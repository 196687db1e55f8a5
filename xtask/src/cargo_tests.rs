use std::path::PathBuf;

use super::{build_step, executable};

#[test]
fn build_step_only_builds() {
    assert_eq!(
        build_step("test -p firn --test lab").to_string(),
        "cargo test -p firn --test lab --no-run --message-format=json-render-diagnostics"
    );
}

#[test]
fn executable_is_the_last_one_of_its_target() {
    let messages = r#"{"reason":"compiler-artifact","target":{"name":"firn"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"lab"},"executable":"/t/lab-1"}
{"reason":"compiler-artifact","target":{"name":"firn"},"executable":"/t/firn-1"}
{"reason":"compiler-artifact","target":{"name":"firn"},"executable":"/t/a \"b\"/firn-2"}
{"reason":"build-finished","success":true}
no message"#;
    assert_eq!(executable(messages, "firn"), Some(PathBuf::from("/t/a \"b\"/firn-2")));
    assert_eq!(executable(messages, "lab"), Some(PathBuf::from("/t/lab-1")));
    assert_eq!(executable(messages, "absent"), None);
}
