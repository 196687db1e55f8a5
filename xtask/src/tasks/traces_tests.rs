use super::{AGAIN, AGAIN_ENDING, arguments, functions_with};

#[test]
fn functions_with_inputs_of_other_sizes_are_those_of_the_file() {
    let sizes = include_str!("../../../traces/sizes/inputs");
    let functions: Vec<_> = functions_with(sizes, "fourfold").collect();
    assert_eq!(functions.len(), 9, "{functions:?}");
    assert_eq!((functions[0], functions[8]), ("chameleon", "recognition"));
    let paper = include_str!("../../../traces/paper/inputs");
    assert_eq!(functions_with(paper, "paper-b").collect::<Vec<_>>(), ["json", "matmul"]);
}

#[test]
fn traces_with_repeats_have_a_function_and_a_period() {
    assert_eq!(arguments("json").unwrap(), ["json"]);
    assert_eq!(arguments("hello-a2").unwrap(), ["hello", "300000"]);
    assert_eq!(arguments("json-sizes").unwrap(), ["json", "sizes"]);
    assert_eq!(arguments("image-diff-holders").unwrap(), ["image-diff", "holders"]);
    assert_eq!(arguments("json-paper").unwrap(), ["json", "paper"]);
    assert!(arguments("missing-a2").unwrap_err().to_string().contains("missing-a2"));
    for (function, period) in AGAIN {
        assert_eq!(arguments(&format!("{function}{AGAIN_ENDING}")).unwrap(), [function, period]);
    }
}
