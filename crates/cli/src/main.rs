//! The firn command.

mod lab;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Start serverless functions from frozen microVMs.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// An emulated Debian machine with real KVM and a real /dev/dax0.0, for computers that lack them
    #[command(subcommand)]
    Lab(lab::LabCommand),
}

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    match command {
        Command::Lab(command) => lab::run(command).unwrap_or_else(|error| {
            complain(&error);
            ExitCode::from(error.exit_code())
        }),
    }
}

fn complain(error: &dyn Error) {
    let mut text = format!("firn: error: {error}");
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    // Nothing is left to be done where even this cannot be written.
    let _ = writeln!(std::io::stderr(), "{text}");
}
