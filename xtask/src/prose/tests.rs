use super::{Finding, check_file, group, kind};

fn messages(path: &str, content: &str) -> Vec<(usize, String)> {
    check_file(path, content)
        .into_iter()
        .map(|Finding { line, message, .. }| (line, message))
        .collect()
}

fn lines_of(path: &str, content: &str) -> Vec<usize> {
    messages(path, content).into_iter().map(|(line, _)| line).collect()
}

fn long(start: &str, columns: usize) -> String {
    format!("{start}{}", "x ".repeat(columns))[..columns].to_owned()
}

#[test]
fn markdown_lines_have_120_columns_outside_tables_code_and_links() {
    let (fits, over, row) = (long("a ", 120), long("a ", 121), long("| a ", 200));
    let url = format!("https://example.org/{}", "x".repeat(150));
    let text = format!(
        "{fits}\n{over}\n{row}\n```sh\n{over}\n```\n{over}\n- [a link]({url})\n[a]: {url}\n<{url}>\nsee {url}\n"
    );
    assert_eq!(lines_of("a.md", &text), [2, 7, 11]);
    assert_eq!(messages("a.md", &over), [(1, "121 columns, at most 120".to_owned())]);
}

#[test]
fn comments_have_100_columns_and_code_has_no_limit_here() {
    let rust =
        format!("{}\n{}\n{}\n", long("// ", 100), long("/// ", 101), long("let a = \"", 150));
    assert_eq!(lines_of("a.rs", &rust), [2]);
    let script = format!("#!{}\n{}\n{}\n", "x".repeat(200), long("# ", 101), long("echo a", 150));
    for name in ["a.sh", "a.py", "Makefile", "a.toml", "lab/init"] {
        assert_eq!(lines_of(name, &script), [2], "{name}");
    }
}

#[test]
fn phrases_match_whole_words_in_any_case() {
    assert_eq!(
        messages("a.md", "Nobody knows.\nThe whole whos-who. They whore.\nIt gives way."),
        [
            (1, "\"nobody\": name the thing that acts".to_owned()),
            (3, "\"gives way\": write evict, yield or is removed".to_owned()),
        ]
    );
    assert_eq!(lines_of("a.md", "The process who asks\n`who` asks\n```\nwho\n```\nwho?"), [1, 6]);
}

#[test]
fn rust_comments_and_literals_are_checked_and_identifiers_are_not() {
    let source = "\
let who = said(nobody);
// who
let a = \"who\"; let who = 1;
let b = r#\"a \"quoted\" who\"#; who();
let c = '\"'; who('\\''); // plain
let d: &'static str = \"a
   who
\"; who();
/* a /* who */ b
   who */ who();
let e = \"// who is here\";
";
    assert_eq!(lines_of("a.rs", source), [2, 3, 4, 7, 9, 10, 11]);
}

#[test]
fn script_comments_are_checked_and_code_is_not() {
    let script = "who='nobody'\necho who # who\necho \"a # who\"\necho ${a#who} $#\n  # said\n";
    assert_eq!(lines_of("a.sh", script), [2, 5]);
    let python = "\"\"\"Who.\"\"\"\nwho = 1\ndef f():\n    \"\"\"A\n    who\n    \"\"\"\n    who = \"who\"\n";
    assert_eq!(lines_of("a.py", python), [1, 5]);
    let literal = "A = \"\"\"\nwho\n\"\"\"\nwho = 1  # who\n";
    assert_eq!(lines_of("a.py", literal), [4]);
}

#[test]
fn files_are_counted_by_crate_or_folder() {
    assert_eq!(group("README.md"), "top");
    assert_eq!(group("crates/pool/src/lib.rs"), "crates/pool");
    assert_eq!(group("guest/agent/src/lib.rs"), "guest/agent");
    assert_eq!(group("guest/build.sh"), "guest");
    assert_eq!(group("docs/a/b.md"), "docs");
    assert!(kind("LICENSE").is_none() && kind("xtask/src/prose/phrases.rs").is_none());
}
