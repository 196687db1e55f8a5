use super::{Dependency, Sources, contains_word, is_test, workspace_dependencies};

#[test]
fn words_are_whole() {
    assert!(contains_word("use serde::Serialize;", "serde"));
    assert!(contains_word("serde", "serde"));
    assert!(!contains_word("use serde_json::Value; use myserde::X;", "serde"));
}

#[test]
fn workspace_dependencies_are_those_of_one_section() {
    let manifest = "[package]\nname = \"x\"\n[workspace.dependencies]\n# why\na = \"1\"\nb-c = { version = \"2\" }\n\n[profile.dev]\nd = 1\n";
    assert_eq!(workspace_dependencies(manifest).collect::<Vec<_>>(), ["a", "b-c"]);
}

#[test]
fn tests_are_recognised_by_their_path() {
    for path in ["a/src/x_tests.rs", "a/src/x/tests.rs", "a/tests/x.rs", "a/benches/x.rs"] {
        assert!(is_test(path), "{path}");
    }
    assert!(!is_test("a/src/testing.rs"));
}

#[test]
fn a_dependency_needs_a_use_of_its_kind() {
    let sources = Sources { production: "use a::A;".to_owned(), tests: "use b::B;".to_owned() };
    let problem = |identifier: &str, dev| {
        let identifier = identifier.to_owned();
        sources.problem(&Dependency { name: identifier.clone(), identifier, dev })
    };
    assert_eq!(problem("a", false), None);
    assert_eq!(problem("b", true), None);
    assert_eq!(problem("b", false), Some("is used only in tests: make it a dev-dependency"));
    assert_eq!(problem("c", false), Some("is not used"));
    assert_eq!(problem("c", true), Some("is not used"));
}
