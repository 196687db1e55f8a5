//! `firn demo`: an end-to-end run of a few functions with every answer checked, and a comparison of
//! planners on players.

mod scenario;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;

use firn_base::monitor_program;
use firn_bench::demo::DemoConfig;
use firn_lab::RunConfig;
use firn_run::jail::{Jail, JailMode};
use firn_vmm::{KVM_DEVICE, Virtualization, open_kvm};

use crate::commands::{bench, lab};
use crate::output;
use scenario::{Scenario, Stage};

/// Arguments of `firn demo`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn demo
  firn demo --verbose --thaws 10 json
  firn demo --json

Functions are booted, frozen to files and into a pool, and thawed in new processes. Where this host's KVM cannot run Linux,
that part runs in the lab. Players then replay recorded functions natively, under any KVM.")]
pub(crate) struct DemoArgs {
    /// Functions to show
    #[arg(default_values = ["hello", "json", "pyaes"])]
    names: Vec<String>,
    /// Directory with the functions, their inputs and expected answers
    #[arg(long, value_name = "DIR", default_value = "guest/functions")]
    functions: PathBuf,
    /// Thaws of each kind; times are their medians
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    thaws: u32,
    /// Show the parts and costs of every start
    #[arg(long)]
    verbose: bool,
    /// Print JSON: one object for the functions, one for the players
    #[arg(long)]
    json: bool,
    /// Leave out the players
    #[arg(long, hide = true)]
    functions_only: bool,
}

pub(crate) fn run(arguments: &DemoArgs) -> Result<ExitCode> {
    ensure!(
        arguments.functions.is_dir(),
        "{} is not a directory: run the demo in firn's checkout, or name the directory with --functions",
        arguments.functions.display()
    );
    let virtualization = Virtualization::of_host();
    let has_kvm = open_kvm(Path::new(KVM_DEVICE)).is_ok();
    if virtualization == Virtualization::Software || !has_kvm {
        output::note(
            "this host's KVM cannot run Linux (`firn doctor` reports why): the functions run in the lab, an emulated \
             Debian machine",
        );
        let code = in_the_lab(arguments)?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
    } else {
        functions(arguments)?;
    }
    if has_kvm && !arguments.functions_only {
        output::note("players: each restores a snapshot and replays a recorded function");
        let players = bench::measure(|harness| Ok(DemoConfig::default().run(harness)?))?;
        if arguments.json {
            output::json(&players);
        } else {
            output::line(&format!("\nMeasured natively on this host:\n{}", players.text()));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The scenarios of the functions, under this machine's KVM.
fn functions(arguments: &DemoArgs) -> Result<()> {
    let program = monitor_program().context("cannot find the path of this program")?;
    let work = tempfile::tempdir().context("cannot create a directory for snapshots")?;
    let jail = Jail::new(JailMode::Auto);
    let mut scenarios: Vec<Scenario> = Vec::new();
    for name in &arguments.names {
        let stage = Stage {
            program: &program,
            jail: &jail,
            function: arguments.functions.join(name),
            work: work.path(),
            thaws: arguments.thaws,
        };
        scenarios.push(stage.run(name).with_context(|| format!("the demo of {name} failed"))?);
    }
    let in_lab = firn_lab::is_here();
    if arguments.json {
        let kvm = if in_lab { "lab" } else { "hardware" };
        output::json(&serde_json::json!({ "kvm": kvm, "functions": scenarios }));
        return Ok(());
    }
    let place = if in_lab {
        "It ran in the lab (software emulation): answers, counts and bytes are true, times are not performance."
    } else {
        "It ran under this host's hardware KVM: times are performance."
    };
    output::line(&table::summary(&scenarios));
    output::line(&format!(
        "Medians of {} thaws, each in a new process. Every answer was right. {place}",
        arguments.thaws
    ));
    if arguments.verbose {
        for scenario in &scenarios {
            output::line(&format!("\n{}", table::details(scenario)));
        }
    }
    Ok(())
}

fn in_the_lab(arguments: &DemoArgs) -> Result<ExitCode> {
    let folder = arguments.functions.canonicalize().unwrap_or(arguments.functions.clone());
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut command = vec![
        "firn".to_owned(),
        "demo".to_owned(),
        "--functions-only".to_owned(),
        format!("--functions=/in/{name}"),
        format!("--thaws={}", arguments.thaws),
    ];
    let flags = [(arguments.json, "--json"), (arguments.verbose, "--verbose")];
    command.extend(flags.iter().filter(|(set, _)| *set).map(|(_, flag)| (*flag).to_owned()));
    command.extend(arguments.names.iter().cloned());
    let config = RunConfig { inputs: vec![folder], ..RunConfig::new(command) };
    Ok(lab::run_command(&config)?)
}
