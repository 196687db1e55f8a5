//! `firn profile`: what runs of a frozen guest touch, recorded and shown.

mod pack;
mod picture;
mod record;
mod show;
mod summary;

use std::process::ExitCode;

use clap::Subcommand;

use firn_base::error_chain;
use firn_memory::recorders::Part;

use crate::output;

/// Commands of `firn profile`.
#[derive(Debug, Subcommand)]
pub(crate) enum ProfileCommand {
    /// Thaw with recorders, and put what was touched into the snapshot's profile
    Record(record::RecordArgs),
    /// Pack the file that a planner maps from the image, by the profile
    Pack(pack::PackArgs),
    /// Show a snapshot's profile
    Show(show::ShowArgs),
}

pub(crate) fn run(command: &ProfileCommand) -> anyhow::Result<ExitCode> {
    match command {
        ProfileCommand::Record(arguments) => record::run(arguments),
        ProfileCommand::Pack(arguments) => pack::run(arguments),
        ProfileCommand::Show(arguments) => show::run(arguments),
    }
}

/// Notes that parts that were not requested are left out, and why.
fn left_out(parts: &[Part], error: &(dyn std::error::Error + 'static)) {
    let names: Vec<&str> = parts.iter().copied().map(Part::name).collect();
    let reason = error_chain(error);
    output::note(&format!("firn: left out: {}: {}", names.join(", "), output::plain(&reason)));
}
