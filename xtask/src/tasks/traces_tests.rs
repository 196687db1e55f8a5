use super::{AGAIN, AGAIN_ENDING, arguments};

#[test]
fn traces_with_repeats_have_a_function_and_a_period() {
    assert_eq!(arguments("json").unwrap(), ["json"]);
    assert_eq!(arguments("hello-a2").unwrap(), ["hello", "300000"]);
    assert_eq!(arguments("json-sizes").unwrap(), ["json", "sizes"]);
    assert!(arguments("missing-a2").unwrap_err().to_string().contains("missing-a2"));
    for (function, period) in AGAIN {
        assert_eq!(arguments(&format!("{function}{AGAIN_ENDING}")).unwrap(), [function, period]);
    }
}
