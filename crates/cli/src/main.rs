//! The firn command.

mod assets;
mod clock;
mod commands;
mod demo;
mod detach;
mod event;
mod host_args;
mod log;
mod metadata_arg;
mod net_arg;
mod output;
mod pool_at;
mod serve_network_arg;
mod signature_args;
mod snapshot_args;
mod supervisor;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use commands::{
    aws, bench, boot, doctor, freeze, image, import, invoke, lab, pager, plan, player, pool,
    profile, record, serve, thaw, tier, top, verify,
};

/// Start serverless functions from frozen microVMs.
#[derive(Debug, Parser)]
#[command(
    version,
    about,
    after_help = "Examples:
  firn boot --name builder --detach guest/functions/hello
  firn invoke builder '{\"name\": \"Ada\"}'
  firn freeze builder snapshots/hello
  firn thaw --invoke '{\"name\": \"Grace\"}' snapshots/hello
  firn lab run -- firn doctor

Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 the function itself failed, 4 firn bench
compare found a regression."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot a microVM and load a function into it
    Boot(boot::BootArgs),
    /// Freeze a running microVM into a snapshot
    Freeze(freeze::FreezeArgs),
    /// Start a microVM from a snapshot
    Thaw(thaw::ThawArgs),
    /// Send a request to the function of a running microVM
    Invoke(invoke::InvokeArgs),
    /// Make a snapshot of the state and memory files that `firn-firecracker` created
    Import(import::ImportArgs),
    /// Show what a thaw would do, without doing it
    Plan(plan::PlanArgs),
    /// Serve the memory of a microVM of another monitor: Firecracker's page fault handler
    Pager(pager::PagerArgs),
    /// Make the measuring guest: it repeats the page accesses of a recorded function
    Player(player::PlayerArgs),
    /// Byte-addressable memory for snapshots: make it, serve it, look into it
    #[command(subcommand)]
    Pool(pool::PoolCommand),
    /// What runs of a snapshot touch: record it, show it
    #[command(subcommand)]
    Profile(profile::ProfileCommand),
    /// Thaw with a recorder, invoke once, and write down every page that was touched
    Record(record::RecordArgs),
    /// Serve functions behind AWS Lambda's API
    Serve(Box<serve::ServeArgs>),
    /// The memories and disks that snapshots can be on: add, list, measure
    #[command(subcommand)]
    Tier(tier::TierCommand),
    /// Print the variables that make AWS's clients use a daemon, for a shell
    Env(aws::EnvArgs),
    /// Run the aws command with a daemon as its endpoint
    Aws(aws::AwsArgs),
    /// Watch what a daemon is doing
    Top(top::TopArgs),
    /// Check every byte of a snapshot
    Verify(verify::VerifyArgs),
    /// Root file systems of functions: build one, list them
    #[command(subcommand)]
    Image(image::ImageCommand),
    /// Tell what this host can do, what is missing, and how to get it
    Doctor(doctor::DoctorArgs),
    /// Measure restores with the player
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Run an end-to-end demo: boot, freeze, thaw, invoke, with every answer checked
    Demo(demo::DemoArgs),
    /// An emulated Debian machine with real KVM and a real /dev/dax0.0, for computers that lack
    /// them
    #[command(subcommand)]
    Lab(lab::LabCommand),
}

fn main() -> ExitCode {
    if let Err(error) = firn_memory::sigbus::install() {
        output::print_error(&error);
        return ExitCode::FAILURE;
    }
    let result: anyhow::Result<ExitCode> = match Cli::parse().command {
        Command::Boot(arguments) => boot::run(&arguments),
        Command::Freeze(arguments) => freeze::run(&arguments),
        Command::Thaw(arguments) => thaw::run(&arguments),
        Command::Invoke(arguments) => invoke::run(&arguments),
        Command::Pager(arguments) => pager::run(&arguments).map_err(Into::into),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Player(arguments) => player::run(&arguments),
        Command::Pool(command) => pool::run(&command),
        Command::Profile(command) => profile::run(&command),
        Command::Record(arguments) => record::run(&arguments),
        Command::Serve(arguments) => serve::run(*arguments),
        Command::Env(arguments) => aws::env(&arguments),
        Command::Aws(arguments) => Err(aws::aws(&arguments).into()),
        Command::Tier(command) => tier::run(&command),
        Command::Top(arguments) => top::run(&arguments).map_err(Into::into),
        Command::Import(arguments) => import::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Image(command) => image::run(&command).map_err(Into::into),
        Command::Doctor(arguments) => Ok(doctor::run(&arguments)),
        Command::Bench(command) => bench::run(&command),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Lab(command) => match lab::run(command) {
            Ok(code) => Ok(code),
            Err(error) => {
                output::print_error(&error);
                return ExitCode::from(error.exit_code());
            }
        },
    };
    result.unwrap_or_else(|error| {
        output::print_error(&*error);
        ExitCode::FAILURE
    })
}
