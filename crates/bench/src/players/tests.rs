use crate::traces::names;

use super::*;

#[test]
fn every_trace_is_recorded_on_the_other_input_of_its_function() {
    // Those with repeated accesses have one input, and those of the record phase are the others'.
    let alone = |name: &String| [":SIZE", "-a2", "-base"].iter().any(|end| name.ends_with(end));
    let carried: Vec<String> = names().filter(|name| !alone(name)).collect();
    assert_eq!(carried.len(), 48 + 9 * SIZES.len() + 4);
    for name in carried {
        let (function, input) = name.rsplit_once('-').unwrap();
        let other = match input {
            "a" => "b",
            "b" => "a",
            _ => "base",
        };
        let pair = format!("{function}-{other}");
        let inputs = inputs(&load(&name).unwrap(), Some(&name)).unwrap();
        let inputs: Vec<&str> = inputs.iter().map(|trace| trace.name.as_str()).collect();
        // The profile is recorded on the last one.
        assert_eq!(inputs, [name.as_str(), pair.as_str()]);
    }
}

#[test]
fn a_trace_without_another_input_is_recorded_on_its_own() {
    assert_eq!(other_input("some/where/f-a.trace").unwrap(), "some/where/f-b.trace");
    assert_eq!(other_input("json-b").unwrap(), "json-a");
    assert_eq!(other_input("json-fourfold").unwrap(), "json-base");
    for name in ["sequential-read:1M", "f.trace", "f-c"] {
        assert_eq!(other_input(name), None);
    }
    for name in ["sequential-read:1M", "hello-a2"].map(str::to_owned) {
        assert_eq!(inputs(&load(&name).unwrap(), Some(&name)).unwrap().iter().count(), 1);
    }
}
