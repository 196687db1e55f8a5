//! `firn bench paper`: the papers' experiments, each as data, table and picture.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;

use firn_bench::ResultFile;
use firn_bench::paper::{EXPERIMENTS, PaperConfig, find};

use super::measure;
use super::players::open;
use crate::output;

/// Arguments of `firn bench paper`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench paper                                        # the names of all experiments
  firn bench paper pass-figure-9 --out results
  firn bench paper all --pool pool.sock --out results --runs 5

Each experiment NAME writes NAME.json, NAME.md and NAME.svg. A planner that this host cannot run, or that fails, is left out,
with the reason. Images are dense, as in the papers. In the experiments of FaaSnap and SnapBPF the pages that guests hold free
have content, except in the guests of faasnap.")]
pub(crate) struct PaperArgs {
    /// Names of experiments, or `all`; without names the command lists them
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Directory for the results
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// Runs of each planner on each trace
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Pool for the planners that map snapshots from one: its medium, or its manager's socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    /// Directory for the players' snapshots, on the medium to measure; default: the directory for
    /// temporary files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(super) fn run(arguments: &PaperArgs) -> anyhow::Result<()> {
    if arguments.names.is_empty() {
        let rows =
            EXPERIMENTS.iter().map(|e| [e.name, e.source, e.title].map(str::to_owned).to_vec());
        output::line(&output::table(&["name", "source", "title"], &rows.collect::<Vec<_>>()));
        return Ok(());
    }
    let experiments = find(&arguments.names)?;
    let out = &arguments.out;
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let (pool, _manager) = open(arguments.pool.as_deref())?;
    let config = PaperConfig { runs: arguments.runs, pool, directory: arguments.dir.clone() };
    measure(|harness| {
        for experiment in experiments {
            let name = experiment.name;
            output::note(&format!("{name}: {} ({})", experiment.title, experiment.source));
            let outcome = config.run(experiment, harness)?;
            let file = |kind: &str| ResultFile::prepare(&out.join(format!("{name}.{kind}")));
            file("json")?.write_json(&outcome)?;
            file("svg")?.write(&outcome.draw())?;
            let table = outcome.markdown();
            file("md")?.write(&table)?;
            output::line(&table);
        }
        Ok(())
    })
}
