//! `firn plan`: what a thaw would do, without doing it.

use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use firn_base::error_chain;
use serde::Serialize;

use firn_memory::planners::{ImageFacts, PlanInput, select};
use firn_memory::{HostFacts, Plan};

use crate::output;
use crate::snapshot_args::SnapshotArgs;

/// Arguments of `firn plan`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn plan snapshots/hello
  firn plan --planner firecracker:readahead=off snapshots/hello
  firn plan --planner all --json snapshots/hello
  firn plan --pool pool.sock hello")]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    snapshot: SnapshotArgs,
    /// Planners, as NAME[:KEY=VALUE,...], separated by commas; `all` for all that this host can run
    /// [default: firecracker, or firn from a pool]
    #[arg(long, value_name = "PLANNER")]
    planner: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Answer {
    plans: Vec<Plan>,
    left_out: Vec<LeftOut>,
}

#[derive(Serialize)]
struct LeftOut {
    planner: String,
    reason: String,
}

pub(crate) fn run(arguments: &PlanArgs) -> anyhow::Result<ExitCode> {
    let list = arguments.planner.as_deref();
    let list = list.unwrap_or_else(|| arguments.snapshot.default_planner());
    let opened = arguments.snapshot.open()?;
    let snapshot = opened.snapshot();
    let host = HostFacts::read()?;
    let mut image = ImageFacts::of_snapshot(snapshot, opened.grant())
        .context("cannot read how the snapshot's image is stored")?;
    // A thaw by a planner that writes to its extent gets a replica, and one by `firn` a copy.
    // Neither is made for a plan that is only shown.
    if let Some(extent) = &mut image.extent {
        extent.replica = true;
    }
    let profile = snapshot.profile()?;
    let input = PlanInput {
        layout: &snapshot.manifest().layout,
        image,
        zero_map: snapshot.zero_map(),
        profile: profile.as_ref(),
        snapshot: Some(snapshot),
        copies: None,
        host: &host,
    };
    let selection = select(list, &input)?;
    let plans = selection
        .planners
        .iter()
        .map(|planner| planner.plan(&input))
        .collect::<Result<Vec<_>, _>>()?;
    let left_out = selection
        .left_out
        .iter()
        .map(|(planner, reason)| LeftOut { planner: planner.clone(), reason: error_chain(reason) })
        .collect();
    let answer = Answer { plans, left_out };
    if arguments.json {
        output::json(&answer);
    } else {
        print(&answer);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(answer: &Answer) {
    for plan in &answer.plans {
        output::line(&format!("planner {}", plan.planner));
        for table in plan.tables() {
            if !table.rows.is_empty() {
                output::line(&format!("\n{}", table.title));
                output::line(&output::table(table.head, &table.rows));
            }
        }
        output::line("");
    }
    for left_out in &answer.left_out {
        output::line(&format!("left out: {}: {}", left_out.planner, left_out.reason));
    }
}
