use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::paper::replays::Quantity;
use crate::paper::systor::systor_experiments;
use crate::paper::tests::outcome;
use crate::paper::{EXPERIMENTS, Way, sentences};

/// Set to write the tables of the documents instead of comparing them: `make result-pages`.
const WRITE: &str = "FIRN_WRITE_PAGES";

fn filled(page: &str, results: &Outcome) -> Result<String, String> {
    fill(page, |_| Ok(serde_json::to_string(results)?))
}

fn documents() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

#[test]
fn tables_of_documents_are_those_of_the_committed_results() {
    let results = documents().join("results");
    let pages = [&results, &documents().join("concepts")].map(fs::read_dir);
    let (mut tables, mut wrong) = (0, Vec::new());
    for entry in pages.into_iter().flat_map(Result::unwrap) {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|ending| ending != "md") {
            continue;
        }
        let page = fs::read_to_string(&path).unwrap();
        let made = fill(&page, |name| {
            tables += 1;
            fs::read_to_string(results.join(format!("{name}.json")))
        });
        let made = made.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let name = path.display();
        let numbers = sentences::check(&made);
        if std::env::var_os(WRITE).is_some() {
            fs::write(&path, &made).unwrap();
        } else {
            assert!(made == page, "{name} has other tables than the results: make result-pages");
        }
        wrong.extend(numbers.err().map(|error| format!("{name}:\n{error}")));
    }
    assert!(tables > 0);
    assert!(wrong.is_empty(), "numbers in sentences differ from the tables:\n{}", wrong.join("\n"));
}

#[test]
fn pictures_of_documents_are_those_of_the_committed_results() {
    let results = documents().join("results");
    let read = |name: &String| fs::read_to_string(results.join(format!("{name}.json"))).ok();
    let mut pictures = 0;
    let mut check = |name: &str, picture: String| {
        let path = results.join(format!("{name}.svg"));
        pictures += 1;
        if std::env::var_os(WRITE).is_some() {
            fs::write(path, picture).unwrap();
        } else {
            let differs = format!("{name}.svg differs from the results: make result-pages");
            assert!(fs::read_to_string(path).is_ok_and(|drawn| drawn == picture), "{differs}");
        }
    };
    let tiers: Vec<SystorOutcome> = systor_experiments()
        .filter_map(|experiment| read(&experiment.name.to_owned()))
        .map(|json| serde_json::from_str(&json).unwrap())
        .collect();
    for experiment in &EXPERIMENTS {
        match experiment.way {
            Way::Replays(parts) => {
                for part in parts {
                    // Parts that measure the same share a file.
                    let Some(json) = experiment.sources(part).iter().find_map(read) else {
                        continue;
                    };
                    let made = Outcome {
                        source: experiment.source.to_owned(),
                        title: experiment.title.to_owned(),
                        quantity: part.quantity,
                        ..serde_json::from_str(&json).unwrap()
                    };
                    check(&experiment.file(part), made.draw());
                }
            }
            Way::Tiers(systor) => {
                let made = tiers.iter().find_map(|outcome| outcome.as_of(&systor));
                check(experiment.name, made.unwrap().draw());
            }
        }
    }
    assert!(pictures >= EXPERIMENTS.len());
}

/// Every key of the committed results is in the documentation of their form.
#[test]
fn keys_of_the_committed_results_are_documented() {
    fn collect(value: &Value, keys: &mut BTreeSet<String>) {
        match value {
            Value::Object(object) => {
                // Maps by the name of a planner, a cell or a function of the kernel.
                let of_names = |key: &str| matches!(key, "left_out" | "functions");
                for (key, value) in object {
                    keys.insert(key.clone());
                    if !(of_names(key) && value.is_object()) {
                        collect(value, keys);
                    }
                }
            }
            Value::Array(values) => values.iter().for_each(|v| collect(v, keys)),
            _ => {}
        }
    }
    let docs = documents();
    let page = fs::read_to_string(docs.join("reference/bench.md")).unwrap();
    let mut keys = BTreeSet::new();
    for entry in fs::read_dir(docs.join("results")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        if is_of_paper(&name) && path.extension().is_some_and(|ending| ending == "json") {
            let json = fs::read_to_string(&path).unwrap();
            collect(&serde_json::from_str(&json).unwrap(), &mut keys);
        }
    }
    let missing: Vec<_> = keys.iter().filter(|key| !page.contains(&format!("`{key}`"))).collect();
    assert!(missing.is_empty(), "docs/reference/bench.md has no `KEY` for {missing:?}");
}

#[test]
fn a_table_has_a_column_for_each_planner() {
    let mut results = outcome(Quantity::Total, &["1", "2"]);
    results.sessions[1].rows[1].total_ms.median *= 3.0;
    let page =
        "# A page\n<!-- pass-x | total, ms -->\nold\n<!-- end -->\n<!-- a comment -->\nend\n";
    let made = filled(page, &results).unwrap();
    let lines: Vec<&str> = made.lines().collect();
    assert!(lines[3].contains("| function | place | firecracker"), "{made}");
    assert!(lines[3].contains("| pass "), "{made}");
    assert!(lines[5].starts_with("| json-a   | 1 "), "{made}");
    assert!(!made.contains("old") && made.ends_with("<!-- end -->\n<!-- a comment -->\nend\n"));
    assert_eq!(filled(&made, &results).unwrap(), made, "a page that is filled stays as it is");
    let page = "<!-- pass-x | total, ms | firecracker -->\n<!-- end -->\n";
    let made = filled(page, &results).unwrap();
    let cells = |line: usize| -> Vec<String> {
        let cells = made.lines().nth(line).unwrap().trim_matches('|').split('|');
        cells.map(|cell| cell.trim().to_owned()).collect()
    };
    assert_eq!(cells(4), ["json-a", "1", "1.00", "1.00"], "{made}");
    assert_eq!(cells(5), ["json-a", "2", "1.00", "3.00"], "{made}");
}

#[test]
fn ratios_of_several_rows_have_a_geometric_mean() {
    let mut results = outcome(Quantity::Total, &["1", "2"]);
    for (place, factors) in results.sessions.iter_mut().zip([[1.0, 2.0, 4.0], [3.0; 3]]) {
        let rows = std::mem::take(&mut place.rows);
        for (trace, factor) in ["json-a", "json-b", "json-c"].iter().zip(factors) {
            let mut rows = rows.clone();
            rows.iter_mut().for_each(|row| row.trace = (*trace).to_owned());
            rows[1].total_ms.median *= factor;
            place.rows.extend(rows);
        }
    }
    let mean = |place: &str, results: &Outcome| {
        let page = "<!-- pass-x | total, ms | firecracker -->\n<!-- end -->\n";
        let made = filled(page, results).unwrap();
        let mut means = made.lines().filter(|line| line.contains("geometric mean"));
        means.find(|line| line.contains(place)).unwrap().to_owned()
    };
    assert!(mean("| 1 ", &results).ends_with("| 1.00        | 2.00 |"));
    assert!(mean("| 2 ", &results).ends_with("| 1.00        | 3.00 |"));
    results.sessions.truncate(1);
    assert!(mean("|", &results).ends_with("| 1.00        | 2.00 |"));
}

#[test]
fn traces_of_one_name_differ_in_their_pages() {
    let mut results = outcome(Quantity::Total, &["1"]);
    let rows = &mut results.sessions[0].rows;
    let more = rows.iter().cloned().map(|row| Row { pages: row.pages + 1, ..row });
    rows.extend(more.collect::<Vec<_>>());
    let pages = rows[0].pages;
    let made = filled("<!-- pass-x | total, ms -->\n<!-- end -->\n", &results).unwrap();
    for key in [pages, pages + 1].map(|pages| format!("| json-a, {pages} pages | ")) {
        assert_eq!(made.matches(&key).count(), 1, "{key}: {made}");
    }
}

#[test]
fn planners_of_one_name_keep_their_options() {
    let all =
        ["pass:a=1", "faasnap:regions=off", "faasnap", "firn:copy=1,read=2", "firn:copy=1,read=3"];
    let named = ["pass", "faasnap:regions=off", "faasnap", "firn:read=2", "firn:read=3"];
    assert_eq!(all.map(|planner| short(planner, &all)), named);
}

#[test]
fn conditions_are_the_host_the_runs_and_the_noise() {
    let mut results = outcome(Quantity::Total, &["1"]);
    results.sessions[0].noise.push(crate::thaw::Noise {
        planner: "pass".to_owned(),
        trace: "json-a".to_owned(),
        cache: crate::Cache::Cold,
        of: "total_ms".to_owned(),
        ratio: crate::Comparison::of(&[1.5]).unwrap(),
    });
    let made = filled("<!-- pass-x | host -->\n<!-- end -->\n", &results).unwrap();
    for part in [results.host.medium.as_str(), "1 runs", "seed 1", "1.50 to 1.50"] {
        assert!(made.contains(part), "{part}: {made}");
    }
}

#[test]
fn what_cannot_be_filled_is_an_error() {
    let results = outcome(Quantity::Total, &["1"]);
    let error = |page: &str| filled(page, &results).unwrap_err();
    assert!(error("<!-- pass-x | total, ms -->\nold\n").contains("has no"));
    assert!(error("<!-- pass-x | none -->\n<!-- end -->\n").contains("no table \"pass-x | none\""));
    assert!(error("<!-- pass-x -->\n<!-- end -->\n").contains("no table"));
    let page = "<!-- pass-x | total, ms | reap -->\n<!-- end -->\n";
    assert!(error(page).contains("no table"));
    let missing = fill("<!-- pass-x | host -->\n<!-- end -->\n", |_| Err(io::Error::other("gone")));
    assert_eq!(missing.unwrap_err(), "cannot read the results of pass-x: gone");
}

#[test]
fn a_comment_of_several_lines_makes_a_table_of_any_file() {
    let file = r#"{"host": 1, "rows": [{"name": "a", "ms": {"median": 2.5, "min": 2, "max": 3}}]}"#;
    let fill = |page: &str| fill(page, |_| Ok(file.to_owned()));
    let page = "One.\n<!-- a-file | rows\nname = name\ntime, ms = ms\n-->\nold\n<!-- end -->\n\
        It takes 2.5 ms.\n<!-- numbers\n2.5 = rows: a: time, ms\n-->\n";
    let made = fill(page).unwrap();
    assert!(made.contains("-->\n\n| name | time, ms            |\n"), "{made}");
    assert!(made.contains("\n| a    | 2.50 (2.00 to 3.00) |\n") && !made.contains("old"), "{made}");
    assert_eq!(fill(&made).unwrap(), made, "a page that is filled stays as it is");
    assert_eq!(sentences::check(&made), Ok(()));
    let wrong = sentences::check(&made.replace("2.5 ", "2.6 ")).unwrap_err();
    assert!(wrong.contains("the tables have 2.5"), "{wrong}");
    let missing = fill("<!-- a-file | rows\nname = names\n-->\n<!-- end -->\n").unwrap_err();
    assert!(missing.contains("no table \"a-file | rows\""), "{missing}");
    assert!(fill("<!-- a-file | host -->\n<!-- end -->\n").is_err(), "the host has no text");
}
