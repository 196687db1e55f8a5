//! Tables of documents that are made of a list of objects in committed JSON, whatever its form.
//!
//! The comment before such a table has a line for each column: its head, and where its cells are.
//!
//! ```text
//! <!-- freeze-disk | rows
//! destination = medium
//! freeze, ms = total_ms
//! freeze / fio = reference.ratio.median
//! -->
//! ```

use firn_base::format_bytes;
use serde_json::Value;

use crate::text::{markdown, number};

/// Makes a table of the objects in `list`, a field of `file`, or of the file itself (`file`). Each
/// line of `columns` is `HEAD = FIELD`, and a field of a field is `FIELD.FIELD`. `None` if the
/// list, or all cells of a column, are missing.
pub(super) fn table(file: &Value, list: &str, columns: &[&str]) -> Option<String> {
    let one = std::slice::from_ref(file);
    let objects = if list == "file" { one } else { field(file, list).as_array()? };
    // The second measurement of a planner only shows the noise.
    let objects: Vec<&Value> = objects.iter().filter(|object| object["label"] != "b").collect();
    let columns: Option<Vec<_>> = columns.iter().map(|line| line.split_once(" = ")).collect();
    let columns = columns?;
    let is_there = |path: &str| objects.iter().any(|object| !field(object, path).is_null());
    if !columns.iter().all(|(_, path)| is_there(path)) {
        return None;
    }
    let head: Vec<&str> = columns.iter().map(|(head, _)| *head).collect();
    let row =
        |object: &&Value| columns.iter().map(|(_, path)| cell(path, field(object, path))).collect();
    Some(markdown(&head, &objects.iter().map(row).collect::<Vec<_>>()))
}

/// The value at a path; null if there is none.
fn field<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(value, |value, name| &value[name])
}

/// A value as text. Of several measurements it is the median with the interval, the 95th
/// percentile, or the smallest and the largest, whichever of them there is.
fn cell(path: &str, value: &Value) -> String {
    let of = |name: &str| value[name].as_f64().map(number);
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Bool(is) => if *is { "yes" } else { "no" }.to_owned(),
        Value::Number(bytes) if path.contains("bytes") => {
            bytes.as_u64().map_or(String::new(), format_bytes)
        }
        Value::Number(count) if count.is_u64() => count.to_string(),
        Value::Number(other) => other.as_f64().map_or(String::new(), number),
        other => {
            let median = of("median").unwrap_or_else(|| other.to_string());
            let range = |low, high| Some(format!("{median} ({} to {})", of(low)?, of(high)?));
            let p95 = || Some(format!("{median} ({})", of("p95")?));
            range("low", "high").or_else(p95).or_else(|| range("min", "max")).unwrap_or(median)
        }
    }
}

#[path = "records_tests.rs"]
mod tests;
