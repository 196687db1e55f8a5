use super::check;

const TABLE: &str = "## One\n\n<!-- pass-x | total, ms -->\n\n| function | place | reap | pass |\n|---|---|---|---|\n\
    | json-a | 1 | 1,240 (9 to 11)* | 10.0 |\n| json-a | 2 | 12.0 | 4.0 |\n\n<!-- end -->\n\n\
    <!-- pass-x | DRAM -->\n| function | pass |\n|---|---|\n| json-a | 1.5 GiB |\n<!-- end -->\n\n";

/// The errors of a section with these sentences and these lines.
fn errors(prose: &str, lines: &str) -> String {
    let page = format!("1.5 before.\n{TABLE}{prose}\n\n<!-- numbers\n{lines}\n-->\n");
    check(&page).err().unwrap_or_default()
}

#[test]
fn numbers_are_those_of_the_tables() {
    let prose = "REAP takes 1240 ms, 124 times as long as\n`pass 2.5`: 400 and 300 % and 200 %, 1.5 and 1536 MiB.";
    let lines = "1240 = total, ms: json-a 1: reap\n124 = total, ms: json-a 1: reap / pass\n\
        300 % = total, ms: json-a 2: reap / pass\n\
        200 % more = pass-x | total, ms: json-a 2: reap / pass\n\
        1.5 GiB = DRAM: json-a: pass\n1536 MiB = DRAM: json-a: pass\n400 = paper";
    assert_eq!(errors(prose, lines), "");
    assert_eq!(errors("It is 103.3.", "103.3 = total, ms: json-a 1: reap / json-a 2: reap"), "");
}

#[test]
fn another_number_is_an_error() {
    let wrong = errors("It takes 11 ms.", "11 = total, ms: json-a 1: pass");
    assert!(wrong.starts_with("11 = total, ms: json-a 1: pass: the tables have 10.000\n"));
    assert!(errors("3.2 times", "3.2 = total, ms: json-a 2: reap / pass").contains("3.000"));
}

#[test]
fn each_number_with_decimals_or_a_unit_is_derived() {
    let missing = errors("It takes 1.2, or 3 to 4 ms in 5 runs.", "7 = paper");
    let missing: Vec<&str> = missing.lines().skip(1).collect();
    assert_eq!(missing, ["4 is not derived", "3 is not derived", "1.2 is not derived"]);
}

#[test]
fn a_line_without_a_sentence_is_an_error() {
    assert_eq!(errors("None.", "7 = paper"), "7 = paper: no sentence has 7");
}

#[test]
fn cells_that_are_missing_or_ambiguous_are_errors() {
    for (line, error) in [
        ("1 = total: json-a 1: pass", "no table"),
        ("1 = total, ms: json-b: pass", "no row"),
        ("1 = total, ms: json-a: pass", "several rows"),
        ("1 = total, ms: json-a 1: firn", "no column"),
        ("1 = total, ms", "TABLE: ROW: COLUMN"),
        ("1 kB = DRAM: json-a: pass", "no unit"),
        ("1", "no \" = \""),
    ] {
        let errors = errors("1.", line);
        assert!(errors.contains(error), "{line}: {errors}");
    }
}
