//! The table of all restores: every planner on every trace.
//!
//! Every session of `firn bench thaw` leaves a JSON file in the folder `OUT`. A session whose file
//! exists is not measured again, so an interrupted run can be resumed. The papers' images are
//! dense, and their guests do not zero freed pages, except FaaSnap's; sparse images and sanitised
//! guests are measured in addition.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::step::Step;
use crate::{Result, runner};

use super::{entries, variable};
use crate::context::Context;

/// Planners are named, so that one that cannot run fails its session.
const PLANNERS: &str =
    "firecracker,firecracker:readahead=off,dram_cached,snapbpf,reap,faast,faasnap";
const SHAPES: &str = "one ten different sparse sanitised";

/// What is measured.
struct Settings {
    out: PathBuf,
    traces: Vec<String>,
    shapes: Vec<String>,
    planners: String,
    /// Runs of one microVM, and of ten at once.
    runs: String,
    runs_of_ten: String,
    /// A manager's socket. With a pool the planners are all that this host can run, those that map
    /// from a pool included, except for sparse images and sanitised guests, because extents have no
    /// holes. Runs of a pool's planners before those that count make replicas and copies.
    pool: Option<String>,
}

impl Settings {
    fn of_environment(context: &Context, shapes: &str, out: PathBuf) -> Result<Self> {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let traces = match variable("TRACES") {
            Some(names) => words(&names),
            None => all_traces(&context.paths.root.join("traces"))?,
        };
        let or = |name, default: &str| variable(name).unwrap_or_else(|| default.to_owned());
        Ok(Self {
            out,
            traces,
            shapes: words(&or("SHAPES", shapes)),
            planners: or("PLANNERS", PLANNERS),
            runs: or("RUNS", "3"),
            runs_of_ten: or("RUNS10", "1"),
            pool: variable("POOL"),
        })
    }
}

fn all_traces(folder: &Path) -> Result<Vec<String>> {
    let names = entries(folder)?;
    Ok(names.iter().filter_map(|name| Some(name.strip_suffix(".trace")?.to_owned())).collect())
}

/// A measurement: the name of its file, and the arguments of `firn bench thaw`.
struct Session {
    name: String,
    arguments: String,
}

pub(super) fn table(context: &Context) -> Result<()> {
    let out = PathBuf::from(variable("OUT").unwrap_or_else(|| "results".to_owned()));
    measure(context, &Settings::of_environment(context, SHAPES, out)?)
}

/// Every planner on every trace with ten players at once, page cache cold and full. Each player
/// checks every byte of its memory, and one wrong byte fails its trace. It is a part of the table
/// of all restores, and `OUT` keeps it.
pub(super) fn matrix(context: &Context) -> Result<()> {
    if !context.host.kvm {
        context.runner.note("the matrix requires this machine's KVM");
        return Ok(());
    }
    let temporary = std::env::temp_dir().join(format!("matrix-{}", std::process::id()));
    let out = variable("OUT").map(PathBuf::from);
    let settings =
        Settings::of_environment(context, "ten", out.clone().unwrap_or(temporary.clone()))?;
    let mut result = measure(context, &settings);
    if result.is_ok() && !context.runner.is_dry() {
        result = fs::read_to_string(settings.out.join("restores.md"))
            .map(|text| runner::line(text.trim_end()))
            .map_err(Into::into);
    }
    if out.is_none() && temporary.exists() {
        fs::remove_dir_all(temporary)?;
    }
    result
}

fn measure(context: &Context, settings: &Settings) -> Result<()> {
    let Context { runner, paths, .. } = context;
    let sessions = sessions(settings)?;
    if !runner.is_dry() {
        fs::create_dir_all(&settings.out)?;
    }
    let mut failed = String::new();
    for Session { name, arguments } in sessions {
        let file = settings.out.join(format!("{name}.json"));
        if file.metadata().is_ok_and(|metadata| metadata.len() > 0) {
            continue;
        }
        let step = Step::new(paths.firn()).args(["bench", "thaw", "--json"]).arg(&file);
        if let Err(error) = runner.run_quietly(&step.args(arguments.split(' '))) {
            runner.note(&error.to_string());
            failed += &format!(" {name}");
        }
    }
    let step = Step::new(paths.firn()).args(["bench", "table"]);
    if runner.is_dry() {
        runner.run(&step.arg(settings.out.join("*.json")))?;
    } else {
        let results = entries(&settings.out)?.into_iter().filter(|name| name.ends_with(".json"));
        let step = step.args(results.map(|name| settings.out.join(name)));
        runner.run_into(&step, &File::create(settings.out.join("restores.md"))?)?;
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("failed:{failed}").into()) }
}

fn sessions(settings: &Settings) -> Result<Vec<Session>> {
    let Settings { planners, runs, pool, .. } = settings;
    let warm_up = if pool.is_some() { 2 } else { 0 };
    let ten = format!(
        "--cache cold,cached --runs {} --warm-up {warm_up} --concurrency 10",
        settings.runs_of_ten
    );
    let in_pool = pool.as_ref().map(|pool| format!(" --pool {pool}")).unwrap_or_default();
    let mut sessions = Vec::new();
    for shape in &settings.shapes {
        for trace in &settings.traces {
            let mut add = |kind: &str, arguments: String| {
                let arguments = format!("--trace {trace} {arguments}");
                sessions.push(Session { name: format!("{trace}.{kind}"), arguments });
            };
            let cold = format!("--planner {planners} --cache cold --runs {runs}");
            let how = match shape.as_str() {
                "one" => format!("--cache cold,cached --runs {runs} --warm-up {warm_up}"),
                "ten" => ten.clone(),
                "different" => format!("{ten} --snapshots different"),
                "sparse" => {
                    add(shape, cold);
                    continue;
                }
                "sanitised" => {
                    add(shape, format!("{cold} --dense"));
                    continue;
                }
                _ => {
                    let known = SHAPES.replace(' ', ", ");
                    return Err(format!("there is no shape {shape}; the shapes are {known}").into());
                }
            };
            let planner = if pool.is_some() { "all" } else { planners };
            add(shape, format!("--planner {planner} --dense --unsanitised {how}{in_pool}"));
        }
    }
    Ok(sessions)
}

#[cfg(test)]
#[path = "restores_tests.rs"]
mod tests;
