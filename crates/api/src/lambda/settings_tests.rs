use serde_json::{Map, from_str};

use super::*;
use crate::lambda::documents::{CreateFunction, FunctionCode};

/// The reference, which has every setting in a table.
const PAGE: &str = include_str!("../../../../docs/reference/serve.md");

/// The members of CreateFunctionRequest and UpdateFunctionConfigurationRequest in AWS Lambda's
/// service model.
const MEMBERS: [&str; 31] = [
    "AcceleratorConfig",
    "Architectures",
    "CapacityProviderConfig",
    "Code",
    "CodeSigningConfigArn",
    "DeadLetterConfig",
    "Description",
    "DurableConfig",
    "Environment",
    "EphemeralStorage",
    "FileSystemConfigs",
    "FunctionName",
    "Handler",
    "ImageConfig",
    "KMSKeyArn",
    "Layers",
    "LoggingConfig",
    "MemorySize",
    "PackageType",
    "Publish",
    "PublishTo",
    "RevisionId",
    "Role",
    "Runtime",
    "RuntimeConfig",
    "SnapStart",
    "Tags",
    "TenancyConfig",
    "Timeout",
    "TracingConfig",
    "VpcConfig",
];

/// Names, the second column and the notes of each row.
fn rows() -> impl Iterator<Item = (Vec<&'static str>, &'static str, &'static str)> {
    let (_, section) = PAGE.split_once("\n### Settings\n").unwrap();
    let table = section.lines().skip_while(|line| !line.starts_with("|---"));
    table.skip(1).take_while(|line| line.starts_with('|')).map(|line| {
        let [_, names, state, notes, _] = line.split('|').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        (quoted(names), state.trim(), notes)
    })
}

/// The texts between backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// The value of a setting that is accepted besides empty ones, as JSON.
fn accepted(name: &str) -> &'static str {
    let known = SETTINGS.iter().find(|(known, ..)| *known == name);
    known.map_or("null", |(_, accepted, _)| accepted)
}

fn set(name: &str, value: Value) -> Result<(), ApiError> {
    check(&Others::from([(name.to_owned(), value)]))
}

#[test]
fn the_reference_has_every_setting_as_the_daemon_handles_it() {
    let mut names = Vec::new();
    for (row, state, notes) in rows() {
        for name in &row {
            // Without a value of any, the members that no operation uses are left.
            let mut document: Map<String, Value> =
                from_str(r#"{ "FunctionName": "f", "Code": {}, "Publish": true }"#).unwrap();
            document.entry(*name).or_insert(Value::Null);
            let request: CreateFunction = serde_json::from_value(document.into()).unwrap();
            let used = !request.settings.others.contains_key(*name);
            let refused = !used && set(name, "another".into()).is_err();
            match state {
                "honoured" | "ignored" => assert!(used, "{name}"),
                "refused" => assert!(refused && accepted(name) == "null", "{name}"),
                only => {
                    assert!(refused && quoted(only) == [accepted(name)], "{name}");
                    set(name, from_str(quoted(only)[0]).unwrap()).unwrap();
                }
            }
        }
        if row == ["Code"] {
            let [zip, refused @ ..] = &quoted(notes)[..] else { panic!("{notes}") };
            let code: FunctionCode = from_str(&format!(r#"{{ "{zip}": "" }}"#)).unwrap();
            assert!(code.others.is_empty(), "{zip}");
            for name in refused {
                assert!(SETTINGS.iter().any(|(known, ..)| known == name), "{name}");
            }
            names.extend(refused);
        }
        names.extend(row);
    }
    for name in MEMBERS.iter().chain(SETTINGS.iter().map(|(name, ..)| name)) {
        let rows = names.iter().filter(|other| *other == name).count();
        assert_eq!(rows, 1, "{name} is in {rows} rows of the table");
    }
}
