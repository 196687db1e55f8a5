//! Whether restores became slower since an earlier run on this host.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Result;
use crate::context::Context;
use crate::step::Step;

use super::variable;

/// The sessions: names of their files, and arguments of `firn bench thaw`. They measure all
/// planners that this host can run, those of a pool included if there is one.
const SESSIONS: [(&str, &str); 3] = [
    ("cold", "--trace hello-a,json-a --dense --cache cold --runs 11"),
    ("cached", "--trace hello-a,json-a --dense --cache cached --runs 11"),
    ("ten", "--trace hello-a --dense --cache cached --concurrency 10 --runs 5"),
];

/// Measures the sessions, and compares them with those of an earlier run. The first run is what
/// later ones are compared with.
pub(super) fn regression(context: &Context) -> Result<()> {
    let base = variable("BASE").map(PathBuf::from);
    let base = base.unwrap_or_else(|| context.paths.cache.join("regression"));
    regression_since(context, &base, variable("POOL").as_deref())
}

/// `pool` is a manager's socket.
fn regression_since(context: &Context, base: &Path, pool: Option<&str>) -> Result<()> {
    let Context { runner, paths, host } = context;
    if !host.kvm {
        runner.note("the regression test requires this machine's KVM");
        return Ok(());
    }
    let firn = |command| Step::new(paths.firn()).args(["bench", command]);
    let later = base.join("new");
    if !runner.is_dry() {
        fs::create_dir_all(&later)?;
    }
    let mut failed = String::new();
    for (name, arguments) in SESSIONS {
        let file = format!("{name}.json");
        let old = base.join(&file);
        let is_first = !old.exists();
        let new = if is_first { old.clone() } else { later.join(&file) };
        let measure = firn("thaw").arg("--json").arg(&new).args(arguments.split(' '));
        let measure = match pool {
            Some(pool) => measure.args(["--warm-up", "1", "--pool", pool]),
            None => measure,
        };
        let mut result = runner.run_quietly(&measure);
        if is_first {
            runner.note(&format!("later runs are compared with {}", old.display()));
        } else if result.is_ok() {
            result = runner.run(&firn("compare").arg(&old).arg(&new));
        }
        if let Err(error) = result {
            runner.note(&error.to_string());
            failed += &format!(" {name}");
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("regressed or failed:{failed}").into()) }
}

#[cfg(test)]
#[path = "regression_tests.rs"]
mod tests;
