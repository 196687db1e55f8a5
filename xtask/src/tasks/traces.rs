//! Records the functions' traces in labs that count instructions.

use crate::{Result, lab};

use super::{entries, variable};
use crate::context::Context;

/// The functions of SYSTOR '22 with a trace that has repeated accesses, and the period of their
/// sampling, in instructions: about a fiftieth of the invocation, but long enough for the guest's
/// timer not to fill it.
const AGAIN: [(&str, &str); 10] = [
    ("chameleon", "10000000"),
    ("cnn_serving", "6000000"),
    ("hello", "300000"),
    ("image_rotate", "30000000"),
    ("json_serdes", "12000000"),
    ("lr_serving", "300000"),
    ("lr_training", "11000000"),
    ("matmul_fb", "2000000"),
    ("pyaes", "15000000"),
    ("video_processing", "17000000"),
];

/// What the name of such a trace ends with.
const AGAIN_ENDING: &str = "-a2";

/// What the names of other recordings end with, each with a folder in `traces`.
const OTHERS: [&str; 4] = [SIZES, PAPER, "holders", "marking"];
const SIZES: &str = "sizes";
const PAPER: &str = "paper";

/// Records the traces that are missing, or those in `FUNCTIONS`: `NAME` for a function's two
/// inputs, `NAME-a2` for its trace with repeated accesses, `NAME-sizes` for inputs of other sizes,
/// `NAME-paper` for those of a paper's size, `NAME-holders` for what held the pages that input a
/// touched, `NAME-marking` for those that the guest's kernel allocated. Every recording has a lab
/// of its own, so a failure of one does not affect the others.
pub(super) fn record(context: &Context) -> Result<()> {
    let mut failed = String::new();
    for name in recordings(context)? {
        let step = lab::run(&context.paths, "--icount --timeout 3600")
            .args(["--in", "guest/functions", "--in", "traces/record.sh"])
            .args(["--in", "traces/sizes", "--in", "traces/paper"])
            .args(["--in", "tests/functions/allocations"])
            .args(["--out", "traces", "--"])
            .args(["sh", "/in/record.sh"])
            .args(arguments(&name)?);
        if let Err(error) = context.runner.run(&step) {
            context.runner.note(&error.to_string());
            failed += &format!(" {name}");
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("not recorded:{failed}").into()) }
}

/// The arguments of record.sh.
fn arguments(name: &str) -> Result<Vec<&str>> {
    if let Some((function, what)) = name.rsplit_once('-')
        && OTHERS.contains(&what)
    {
        return Ok(vec![function, what]);
    }
    let Some(function) = name.strip_suffix(AGAIN_ENDING) else { return Ok(vec![name]) };
    let period = AGAIN.iter().find(|(known, _)| *known == function).map(|(_, period)| *period);
    let unknown = || format!("{name} has no period of its sampling: see xtask/src/tasks/traces.rs");
    Ok(vec![function, period.ok_or_else(unknown)?])
}

fn recordings(context: &Context) -> Result<Vec<String>> {
    if let Some(names) = variable("FUNCTIONS") {
        return Ok(names.split_whitespace().map(str::to_owned).collect());
    }
    let root = &context.paths.root;
    let recorded = |name: &str| root.join(format!("traces/{name}.trace")).is_file();
    let functions = entries(&root.join("guest/functions"))?;
    let missing = functions
        .into_iter()
        .filter(|name| !["a", "b"].iter().all(|input| recorded(&format!("{name}-{input}"))));
    let again = AGAIN.iter().map(|(name, _)| format!("{name}{AGAIN_ENDING}"));
    let again = again.filter(|name| !recorded(name));
    let mut names: Vec<String> = missing.chain(again).collect();
    for (folder, last) in [(SIZES, "fourfold"), (PAPER, "paper-b")] {
        let inputs = std::fs::read_to_string(root.join(format!("traces/{folder}/inputs")))?;
        let missing = functions_with(&inputs, last)
            .filter(|name| !recorded(&format!("{folder}/{name}-{last}")));
        names.extend(missing.map(|name| format!("{name}-{folder}")));
    }
    Ok(names)
}

/// The functions that have an input in a list of inputs.
fn functions_with<'a>(inputs: &'a str, input: &str) -> impl Iterator<Item = &'a str> {
    inputs.lines().filter_map(move |line| {
        let (function, rest) = line.split_once(' ')?;
        (rest.split(' ').next() == Some(input)).then_some(function)
    })
}

#[cfg(test)]
#[path = "traces_tests.rs"]
mod tests;
