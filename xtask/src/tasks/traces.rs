//! Records the functions' traces in labs that count instructions.

use crate::{Result, lab};

use super::{entries, variable};
use crate::context::Context;

/// Records the traces that are missing, or those of the functions in `FUNCTIONS`. Every function
/// has a lab of its own, so a failure of one does not affect the traces of the others.
pub(super) fn record(context: &Context) -> Result<()> {
    let mut failed = String::new();
    for function in functions(context)? {
        let step = lab::run(&context.paths, "--icount --timeout 3600")
            .args(["--in", "guest/functions", "--in", "traces/record.sh", "--out", "traces", "--"])
            .args(["sh", "/in/record.sh"])
            .arg(&function);
        if let Err(error) = context.runner.run(&step) {
            context.runner.note(&error.to_string());
            failed += &format!(" {function}");
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("not recorded:{failed}").into()) }
}

fn functions(context: &Context) -> Result<Vec<String>> {
    if let Some(names) = variable("FUNCTIONS") {
        return Ok(names.split_whitespace().map(str::to_owned).collect());
    }
    let root = &context.paths.root;
    let recorded = |name: &String| {
        ["a", "b"].iter().all(|input| root.join(format!("traces/{name}-{input}.trace")).is_file())
    };
    Ok(entries(&root.join("guest/functions"))?.into_iter().filter(|name| !recorded(name)).collect())
}
