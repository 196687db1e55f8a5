//! The Makefile's targets that need more than a line of shell.
//!
//! `cargo run -q -p xtask -- [--dry-run] TASK` from the repository's root. `--dry-run` prints the
//! commands of a task and runs none of them. Variables such as `TRACES` and `OUT` are read from the
//! environment, where `make` puts them.

mod cargo;
mod context;
mod host;
mod lab;
mod paths;
mod prose;
mod runner;
mod step;
mod tasks;
mod unused;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use context::Context;
use host::Host;
use paths::Paths;
use runner::Runner;

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

fn main() -> ExitCode {
    match run(std::env::args().skip(1).collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "xtask: error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut arguments: Vec<String>) -> Result<()> {
    let dry_run = arguments.first().is_some_and(|first| first == "--dry-run");
    if dry_run {
        arguments.remove(0);
    }
    let [name] = arguments.as_slice() else { return Err(usage().into()) };
    let Some((_, _, task)) = tasks::ALL.iter().find(|(task, ..)| task == name) else {
        return Err(format!("there is no task {name}\n{}", usage()).into());
    };
    let host = Host::detect()?;
    let paths = Paths::of_environment()?;
    let mut required = host.required();
    if paths.cache.join("clients").is_dir() {
        required += ",clients";
    }
    let context = Context { runner: Runner::new(dry_run, required), host, paths };
    task(&context)?;
    for step in context.runner.listed() {
        runner::line(&step);
    }
    Ok(())
}

fn usage() -> String {
    let mut text = "usage: cargo run -q -p xtask -- [--dry-run] TASK\ntasks:".to_owned();
    for (name, purpose, _) in tasks::ALL {
        text += &format!("\n  {name:19} {purpose}");
    }
    text
}
