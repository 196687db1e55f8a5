use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use firn_memory::trace::{Access, GapUnit};

use super::{BASE, EMBEDDED, LoadTraceError, SIZES, load, names};

#[test]
fn generated_traces_touch_every_page_once_in_order() {
    for (name, access) in
        [("sequential-read:16M", Access::Read), ("sequential-write:16384K", Access::Write)]
    {
        let loaded = load(name).unwrap();
        assert_eq!(loaded.name, name);
        assert_eq!(loaded.trace.zero_map().count(), 0);
        let touches = loaded.trace.touches();
        assert!(touches.iter().all(|touch| touch.access == access && touch.gap == 0));
        assert!(touches.iter().map(|touch| touch.page).eq(0..4096));
    }
}

#[test]
fn every_built_in_trace_can_be_loaded() {
    for name in names().filter(|name| !name.ends_with(":SIZE")) {
        assert_eq!(load(&name).unwrap().name, name);
    }
}

/// The functions are those of the papers that docs/reference/workloads.md names.
#[test]
fn every_function_has_two_inputs_with_the_same_memory() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/functions");
    let functions = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let functions: Vec<String> = functions.map(|name| name.into_string().unwrap()).collect();
    assert_eq!(functions.len(), 24, "{functions:?}");
    for function in &functions {
        let [a, b] = ["a", "b"].map(|input| load(&format!("{function}-{input}")).unwrap().trace);
        assert_eq!(a.layout(), b.layout(), "{function}");
        assert_ne!(a.touches(), b.touches(), "{function}");
    }
    let again = of_folder("").filter(|(name, _)| name.ends_with("-a2")).count();
    assert_eq!(of_folder("").count() - again, 2 * functions.len());
}

/// The traces in a folder of `traces`.
fn of_folder(folder: &str) -> impl Iterator<Item = &'static (&'static str, &'static [u8])> {
    EMBEDDED.iter().filter(move |(name, _)| {
        let (_, input) = name.rsplit_once('-').unwrap();
        let own = if name.contains("-paper-") {
            "paper"
        } else if input == BASE || SIZES.iter().any(|(_, size)| *size == input) {
            "sizes"
        } else {
            ""
        };
        own == folder
    })
}

#[test]
fn inputs_of_other_sizes_have_the_memory_of_the_record_phase() {
    for (name, _) in EMBEDDED.iter().filter(|(name, _)| name.ends_with("-base")) {
        let of = |size: &str| load(&name.replace(BASE, size)).unwrap().trace;
        let base = of(BASE);
        let work = |size: &str| of(size).work();
        for (_, size) in SIZES {
            assert_eq!(of(size).layout(), base.layout(), "{name}");
            assert_eq!(of(size).zero_map(), base.zero_map(), "{name}: of another snapshot");
        }
        let work = SIZES.map(|(_, size)| work(size));
        assert!(work.is_sorted(), "{name}: {work:?}");
    }
}

/// `12345` as `12,345`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).unwrap()).collect();
    groups.join(",")
}

/// A table of `traces/README.md`: the content of each trace of a folder, and the source of its
/// function.
fn table(folder: &str) -> String {
    let functions = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/functions");
    let mut table = String::new();
    for (name, bytes) in of_folder(folder) {
        let trace = load(name).unwrap().trace;
        let origin = trace.origin();
        let again = trace.again().map_or("", |_| "2");
        assert_eq!(format!("{}-{}{again}", origin.function, origin.input), *name);
        assert_eq!(origin.gaps, GapUnit::Instructions, "{name}");
        let settings = functions.join(&origin.function).join("function.toml");
        let settings = fs::read_to_string(settings).unwrap();
        let source = settings.lines().find_map(|line| line.strip_prefix("source = "));
        let instructions = trace.work();
        writeln!(
            table,
            "| `{name}` | {} MiB | {} | {} | {} | {:.1} | {} | {} |",
            grouped(trace.layout().total_bytes() >> 20),
            grouped(trace.touches().len() as u64),
            grouped(trace.touched_pages()),
            grouped(trace.written_pages()),
            instructions as f64 / 1e6,
            grouped(bytes.len() as u64),
            source.unwrap().trim_matches('"'),
        )
        .unwrap();
    }
    table
}

/// The repeated accesses of the traces that have them.
fn table_of_repeats() -> String {
    let mut table = String::new();
    for (name, _) in EMBEDDED {
        let trace = load(name).unwrap().trace;
        let Some(again) = trace.again() else { continue };
        // Both invocations serve the same request.
        assert!(0 < again.request && again.request < trace.accesses().count(), "{name}");
        assert!(!again.repeats.is_empty() && !again.second.is_empty(), "{name}");
        let second: HashSet<u64> = again.second.iter().map(|touch| touch.page).collect();
        let first: HashSet<u64> = trace.touches().iter().map(|touch| touch.page).collect();
        writeln!(
            table,
            "| `{name}` | {} | {} | {} | {} | {} | {} |",
            grouped(again.period),
            grouped(again.request as u64),
            grouped(again.repeats.len() as u64),
            grouped(again.second.len() as u64),
            grouped(second.len() as u64),
            grouped(second.difference(&first).count() as u64),
        )
        .unwrap();
    }
    table
}

#[test]
fn the_readme_describes_every_trace() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../traces/README.md");
    let readme = fs::read_to_string(readme).unwrap();
    for table in [table(""), table("sizes"), table("paper"), table_of_repeats()] {
        assert!(readme.contains(&table), "traces/README.md must contain:\n{table}");
    }
}

#[test]
fn a_file_is_loaded_by_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("some.trace");
    let trace = load("sequential-read:1M").unwrap().trace;
    fs::write(&path, trace.encode().unwrap()).unwrap();
    let loaded = load(path.to_str().unwrap()).unwrap();
    assert_eq!((loaded.name.as_str(), loaded.trace), ("some", trace));
    fs::write(&path, b"FIRN").unwrap();
    assert!(matches!(load(path.to_str().unwrap()), Err(LoadTraceError::Decode { .. })));
}

#[test]
fn an_unknown_trace_is_rejected_with_the_known_names() {
    let error = load("pyaess").unwrap_err();
    assert!(error.to_string().contains("sequential-read:SIZE"), "{error}");
    assert!(matches!(load("missing.trace"), Err(LoadTraceError::Read { .. })));
    for size in ["", "M", "64X", "-1", "99999999999999999999", "18446744073709551615G"] {
        let name = format!("sequential-read:{size}");
        assert!(matches!(load(&name), Err(LoadTraceError::Size(_))), "{size}");
    }
    assert!(matches!(load("sequential-read:1"), Err(LoadTraceError::Layout { .. })));
}
