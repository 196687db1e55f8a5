//! `firn demo`: the whole way of a few functions, shown step by step, every answer checked.

mod story;
mod table;

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use thiserror::Error;

use firn_lab::{LabError, RunConfig};
use firn_vmm::{KVM_DEVICE, Virtualization, open_kvm};

use crate::commands::lab;
use crate::output;
use story::StoryError;

/// Arguments of `firn demo`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn demo
  firn demo --thaws 10 json
  firn demo --json

Where this host's KVM cannot run Linux, the demo runs in the lab by itself.")]
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
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Why the demo did not get through.
#[derive(Debug, Error)]
pub(crate) enum DemoError {
    #[error("reading /proc/cpuinfo")]
    Cpuinfo(#[source] io::Error),
    #[error(transparent)]
    Lab(#[from] LabError),
    #[error("{0} is no directory: run the demo in firn's checkout, or name it with --functions")]
    Functions(PathBuf),
    #[error("finding out where firn itself is, or where it can write")]
    Files(#[source] io::Error),
    #[error("showing {name}")]
    Story { name: String, source: StoryError },
}

pub(crate) fn run(arguments: &DemoArgs) -> Result<ExitCode, DemoError> {
    if !arguments.functions.is_dir() {
        return Err(DemoError::Functions(arguments.functions.clone()));
    }
    let in_lab = firn_lab::is_here();
    let virtualization = Virtualization::detect().map_err(DemoError::Cpuinfo)?;
    if virtualization == Virtualization::Software || open_kvm(Path::new(KVM_DEVICE)).is_err() {
        output::note(
            "this host's KVM cannot run Linux (`firn doctor` says why): the demo runs in the lab, \
             an emulated Debian machine",
        );
        return Ok(in_the_lab(arguments)?);
    }

    let executable = std::env::current_exe().map_err(DemoError::Files)?;
    let work = tempfile::tempdir().map_err(DemoError::Files)?;
    let mut stories = Vec::new();
    for name in &arguments.names {
        let stage = story::Stage {
            executable: &executable,
            function: arguments.functions.join(name),
            work: work.path(),
            thaws: arguments.thaws,
        };
        let story =
            stage.tell(name).map_err(|source| DemoError::Story { name: name.clone(), source })?;
        stories.push(story);
    }
    let place = if in_lab {
        "in the lab (software emulation): answers, counts and bytes are true; times say nothing of \
         performance"
    } else {
        "under this host's hardware KVM: times are performance"
    };
    if arguments.json {
        let kvm = if in_lab { "lab" } else { "hardware" };
        output::json(&serde_json::json!({ "kvm": kvm, "functions": stories }));
    } else {
        for story in &stories {
            output::line(&table::of(story));
        }
        output::line(&format!("Every answer was right. It ran {place}."));
    }
    Ok(ExitCode::SUCCESS)
}

fn in_the_lab(arguments: &DemoArgs) -> Result<ExitCode, LabError> {
    let folder = arguments.functions.canonicalize().unwrap_or(arguments.functions.clone());
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut command = vec![
        "firn".to_owned(),
        "demo".to_owned(),
        format!("--functions=/in/{name}"),
        format!("--thaws={}", arguments.thaws),
    ];
    if arguments.json {
        command.push("--json".to_owned());
    }
    command.extend(arguments.names.iter().cloned());
    let config = RunConfig { inputs: vec![folder], ..RunConfig::new(command) };
    lab::run_command(&config)
}
