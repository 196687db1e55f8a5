use serde_json::json;

use super::*;

fn file() -> Value {
    json!({ "rows": [
        {
            "name": "a",
            "runs": 64,
            "image_bytes": 1 << 20,
            "time": { "median": 1.0, "p95": 2.0, "min": 0.5, "max": 3.0 },
            "of": { "ratio": { "median": 1.5, "min": 1.25, "max": 2.0 } },
        },
        { "name": "b", "runs": true, "other": { "median": 10.0, "low": 9.0, "high": 11.0, "max": 12.0 } },
    ] })
}

#[test]
fn each_object_is_a_row_and_each_line_a_column() {
    let columns = [
        "n = name",
        "runs = runs",
        "image = image_bytes",
        "ms = time",
        "o = other",
        "r = of.ratio",
    ];
    let made = table(&file(), "rows", &columns).unwrap();
    let rows: Vec<Vec<&str>> = made
        .lines()
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert_eq!(rows[0], ["n", "runs", "image", "ms", "o", "r"]);
    let a = ["a", "64", "1.0 MiB", "1.00 (2.00)", "", "1.50 (1.25 to 2.00)"];
    assert_eq!(rows[2], a);
    let one = table(&file()["rows"][0], "file", &["n = name"]).unwrap();
    assert!(one.lines().nth(2).is_some_and(|row| row.starts_with("| a")), "{one}");
    assert_eq!(rows[3], ["b", "yes", "", "", "10.0 (9.00 to 11.0)", ""]);
}

#[test]
fn a_field_that_no_object_has_is_an_error() {
    assert_eq!(table(&file(), "rows", &["n = name", "ms = times"]), None);
    assert_eq!(table(&file(), "rows", &["n"]), None);
    assert_eq!(table(&file(), "row", &["n = name"]), None);
}
