use super::{AGAIN, AGAIN_ENDING, arguments, sized};

#[test]
fn functions_with_inputs_of_other_sizes_are_those_of_the_file() {
    let functions: Vec<_> = sized(include_str!("../../../traces/sizes/inputs")).collect();
    assert_eq!(functions.len(), 9, "{functions:?}");
    assert_eq!((functions[0], functions[8]), ("chameleon", "recognition"));
}

#[test]
fn traces_with_repeats_have_a_function_and_a_period() {
    assert_eq!(arguments("json").unwrap(), ["json"]);
    assert_eq!(arguments("hello-a2").unwrap(), ["hello", "300000"]);
    assert_eq!(arguments("json-sizes").unwrap(), ["json", "sizes"]);
    assert_eq!(arguments("json-holders").unwrap(), ["json", "holders"]);
    assert!(arguments("missing-a2").unwrap_err().to_string().contains("missing-a2"));
    for (function, period) in AGAIN {
        assert_eq!(arguments(&format!("{function}{AGAIN_ENDING}")).unwrap(), [function, period]);
    }
}
