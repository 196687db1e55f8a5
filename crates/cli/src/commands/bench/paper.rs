//! `firn bench paper`: the papers' experiments, each as data, table and picture.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;

use firn_bench::paper::systor::{SystorConfig, SystorExperiment, TierName, systor_experiments};
use firn_bench::paper::{Experiment, PaperConfig, PaperError, Replays, Way, find, help, listing};
use firn_bench::tier::TierList;
use firn_bench::{Harness, ResultFile};

use super::measure;
use super::players::open;
use crate::commands::tier;
use crate::output;

const EXAMPLES: &str = "Examples:
  firn bench paper                                        # the names of all experiments
  firn bench paper pass-figure-9 --out results
  firn bench paper all --pool pool.sock --out results --runs 5
  firn bench paper faasnap-figure-9 --trace hello-a --runs 1
  firn bench paper systor-figure-2 systor-table-5 --out results
  firn bench paper systor-figure-4 --trace hello-a2 --most 8 --tier my-ssd
  firn bench paper systor-figure-2 --only dram,cxl --runs 3 --out results

Each experiment NAME writes NAME.json, NAME.md and NAME.svg. A planner that this host cannot run, or that fails, is left out,
with the reason. Images are dense, as in the papers. In the experiments of FaaSnap and SnapBPF the pages that guests hold free
have content, except in the guests of faasnap.

The experiments of SYSTOR '22 (`systor` names all of them) measure cold and warm invocations on tiers: dram is real, nvme and
ssd are emulated by a compressed disk in memory (zram) with limits, dcpm (persistent memory) and cxl are modelled. They
need root, the kernel's zram and mkfs.ext4, and so does faasnap-figure-11. A tier or cell that fails or does not fit into
memory is left out, with the reason. pass-figure-4 and pass-table-2 need --dir on a DAX file system.

Results are written after each function. What the same build has measured into the directory with the same options is not
measured again, so an interrupted command goes on where it was when it is repeated.";

/// The end of the help text.
fn after_help() -> String {
    format!("{EXAMPLES}\n\nNames:\n{}", help())
}

/// Arguments of `firn bench paper`.
#[derive(Debug, Args)]
#[command(after_help = after_help())]
pub(crate) struct PaperArgs {
    /// Names of experiments, or `all`, `pass`, `faasnap`, `snapbpf` or `systor`; without names the
    /// command lists them
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Directory for the results
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// Runs of each planner on each trace; where one takes 10 s, or fills a budget, at most five
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Pool for the planners that map snapshots from one: its medium, or its manager's socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    /// Directory for the players' snapshots, on the medium to measure; default: the directory for
    /// temporary files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Traces in place of an experiment's own; SYSTOR '22: only these of its functions
    #[arg(long, value_name = "TRACE", value_delimiter = ',')]
    trace: Vec<String>,
    /// At most this number of microVMs at once
    #[arg(long, value_name = "N", default_value_t = u32::MAX, hide_default_value = true, value_parser = clap::value_parser!(u32).range(1..))]
    most: u32,
    /// Seed of the random order in which planners and tiers have their turns; the results have it
    #[arg(long, value_name = "SEED")]
    order: Option<u64>,
    /// SYSTOR '22: only these of an experiment's tiers: dram, cxl, dcpm, nvme, ssd
    #[arg(long, value_name = "TIER", value_delimiter = ',')]
    only: Vec<TierName>,
    /// SYSTOR '22: also measure these tiers of `firn tier ls`
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    tier: Vec<String>,
}

pub(super) fn run(arguments: &PaperArgs) -> anyhow::Result<()> {
    if arguments.names.is_empty() {
        output::line(&output::table(&["name", "source", "title", ""], &listing()));
        return Ok(());
    }
    let experiments = find(&arguments.names)?;
    let out = &arguments.out;
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let (pool, _manager) = open(arguments.pool.as_deref())?;
    let config = PaperConfig {
        runs: arguments.runs,
        pool,
        directory: arguments.dir.clone(),
        traces: arguments.trace.clone(),
        most: arguments.most,
        order: arguments.order,
    };
    measure(|harness| {
        let all = experiments.len();
        for (number, experiment) in (1..).zip(experiments) {
            let Experiment { name, title, source, way, .. } = experiment;
            output::note(&format!("{name}, {number} of {all}: {title} ({source})"));
            match way {
                Way::Replays(parts) => {
                    let named = arguments.names.iter().any(|given| given == name);
                    for part in *parts {
                        match run_part(arguments, &config, experiment, part, harness) {
                            Err(error) if !named && is_of_medium(&error) => {
                                output::note(&format!("left out: {error:#}"));
                            }
                            result => result?,
                        }
                    }
                }
                Way::Tiers(systor) => run_systor(arguments, systor, harness)?,
            }
        }
        Ok(())
    })
}

/// Whether the given directories are on no such medium as the experiment needs.
fn is_of_medium(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(PaperError::Medium { .. }))
}

fn run_part(
    arguments: &PaperArgs,
    config: &PaperConfig,
    experiment: &Experiment,
    part: &Replays,
    harness: &Harness<'_>,
) -> anyhow::Result<()> {
    let out = &arguments.out;
    let earlier = known(out, experiment.sources(part))?;
    let name = experiment.file(part);
    let outcome =
        config.run(experiment, part, earlier, harness, |so_far| save(out, &name, so_far))?;
    let (picture, table) = (outcome.draw(), outcome.markdown());
    write(out, &name, &outcome, &picture, &table)?;
    output::line(&table);
    Ok(())
}

fn run_systor(
    arguments: &PaperArgs,
    experiment: &SystorExperiment,
    harness: &Harness<'_>,
) -> anyhow::Result<()> {
    let list = TierList::read(&tier::file()?)?;
    let tiers = arguments.tier.iter().map(|name| list.get(name).cloned());
    let config = SystorConfig {
        runs: arguments.runs,
        functions: arguments.trace.clone(),
        most: arguments.most,
        only: arguments.only.clone(),
        tiers: tiers.collect::<Result<_, _>>()?,
        order: arguments.order,
    };
    let (out, name) = (&arguments.out, experiment.name);
    let earlier = known(out, systor_experiments().map(|experiment| experiment.name.to_owned()))?;
    let outcome = config.run(experiment, &earlier, harness, |so_far| save(out, name, so_far))?;
    let (picture, table) = (outcome.draw(), outcome.markdown());
    write(out, name, &outcome, &picture, &table)?;
    output::line(&table);
    Ok(())
}

/// Writes what has been measured so far. A file that cannot be written is an error at the end, with
/// all results.
fn save(out: &Path, name: &str, so_far: &impl Serialize) {
    let saved = ResultFile::prepare(&out.join(format!("{name}.json")));
    let _ = saved.and_then(|file| file.write_json(so_far));
}

/// The results of experiments in a directory. A file of an earlier firn that does not fit is not
/// used.
fn known<T: DeserializeOwned>(
    out: &Path,
    names: impl IntoIterator<Item = String>,
) -> anyhow::Result<Vec<T>> {
    let mut known = Vec::new();
    for name in names {
        let path = out.join(format!("{name}.json"));
        match fs::read_to_string(&path) {
            Ok(text) => known.extend(serde_json::from_str::<T>(&text).ok()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        }
    }
    Ok(known)
}

fn write(
    out: &Path,
    name: &str,
    outcome: &impl Serialize,
    picture: &str,
    table: &str,
) -> anyhow::Result<()> {
    let file = |kind: &str| ResultFile::prepare(&out.join(format!("{name}.{kind}")));
    file("json")?.write_json(outcome)?;
    file("svg")?.write(picture)?;
    Ok(file("md")?.write(table)?)
}
