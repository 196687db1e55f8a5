//! `firn-firecracker`: Firecracker's API for firn's microVMs.
//!
//! A process runs one microVM, as Firecracker's does: it takes the same flags, serves the same API
//! on a unix socket, and ends with the same exit codes, so that Firecracker's clients use it
//! unmodified. What firn does not support is refused by an error that names the field
//! (`docs/firecracker.md`).
//!
//! Two threads matter: the API's parses requests, opens files, keeps the configuration
//! ([`controller::Controller`]) and flushes the metrics; the main thread makes the microVM, serves
//! it, and ends the process with it ([`vmm::VmmThread`]).

mod api;
mod args;
mod config;
mod controller;
mod exit;
mod fault;
mod logger;
mod metrics;
mod vmm;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use firn_base::error_chain;
use firn_run::jail;
use rustix::time::ClockId;
use serde_json::{Map, Value};

use crate::api::Request;
use crate::args::Args;
use crate::config::VmConfig;
use crate::controller::Controller;
use crate::exit::Exit;
use crate::fault::Fault;
use crate::logger::Level;
use crate::metrics::{Metrics, MetricsConfig, StartTimes};
use crate::vmm::Vmm;

/// The version of Firecracker's API that this program follows.
const VERSION: &str = "1.16.0";
/// What clients expect as the program's name.
const APP_NAME: &str = "Firecracker";

fn main() -> ExitCode {
    match Args::try_parse() {
        Ok(args) => run(&args).into(),
        Err(error) => {
            // Help and errors; standard error may be closed.
            let _ = error.print();
            match error.kind() {
                ErrorKind::DisplayHelp => Exit::Success.into(),
                _ => Exit::Arguments.into(),
            }
        }
    }
}

fn run(args: &Args) -> Exit {
    let begin = StartTimes::now(ClockId::Monotonic);
    if args.version {
        print(&format!("{APP_NAME} v{VERSION}\n\nfirn {}", env!("CARGO_PKG_VERSION")));
        return Exit::Success;
    }
    logger::set_id(&args.id);
    if let Err(error) = jail::share_heap() {
        return failed(Exit::Failure, &error_chain(&error));
    }
    let limit = args.http_api_max_payload_size;
    let metrics = Metrics::default();
    let (vmm, vmm_thread) = Vmm::new(metrics.clone());
    let mmds_limit = args.mmds_size_limit.unwrap_or(limit);
    let (id, confine) = (args.id.clone(), !args.no_seccomp);
    let mut controller = Controller::new(id, vmm, metrics.clone(), mmds_limit, confine);
    if let Err(fault) = configure(&mut controller, args) {
        return failed(Exit::Failure, &fault.message);
    }
    log!(Level::Info, "Running {APP_NAME} v{VERSION} (firn {})", env!("CARGO_PKG_VERSION"));
    let config = match args.config_file.as_deref().map(read_config).transpose() {
        Ok(config) => config,
        Err(fault) => return failed(Exit::Configuration, &fault.message),
    };
    let listener = if args.no_api { None } else { Some(api::bind(&args.api_sock)) };
    let listener = match listener.transpose() {
        Ok(listener) => listener,
        Err(error) => return failed(Exit::Failure, &error_chain(&error)),
    };
    metrics.started(StartTimes {
        wall: args.start_time_us.unwrap_or(begin),
        cpu: args.start_time_cpu_us.unwrap_or_default(),
        parent_cpu: args.parent_cpu_time_us.unwrap_or_default(),
    });
    let flushed = metrics.clone();
    let control = move || {
        if let Some(config) = config
            && let Err(fault) = controller.set_up(&config)
        {
            let exit = failed(Exit::Configuration, &fault.message);
            end(exit);
        }
        let Err(error) = api::serve(listener, limit, controller, flushed);
        end(failed(Exit::Failure, &error_chain(&error)));
    };
    if let Err(error) = std::thread::Builder::new().name("fc_api".to_owned()).spawn(control) {
        return failed(Exit::Failure, &format!("cannot start the thread of the API: {error}"));
    }
    let exit = vmm_thread.serve(confine);
    // The file may be full.
    let _ = metrics.flush();
    exit
}

/// Applies the options that requests have, too.
fn configure(controller: &mut Controller, args: &Args) -> Result<(), Fault> {
    if let Some(config) = args.logger() {
        controller.handle(Request::PutLogger(config))?;
    }
    if let Some(path) = &args.metrics_path {
        let config = MetricsConfig { metrics_path: path.clone() };
        controller.handle(Request::PutMetrics(config))?;
    }
    if let Some(path) = &args.metadata {
        controller.handle(Request::PutMmds(read_json("the metadata", path)?))?;
    }
    Ok(())
}

/// Reads a configuration file. A key without a value is as if it were absent, because clients write
/// all that they know.
fn read_config(path: &Path) -> Result<VmConfig, Fault> {
    let what = "the configuration file";
    let mut config: Map<String, Value> = read_json(what, path)?;
    config.retain(|_, value| !value.is_null());
    serde_json::from_value(config.into()).map_err(|error| not_valid(what, path, &error))
}

fn read_json<T: serde::de::DeserializeOwned>(what: &str, path: &Path) -> Result<T, Fault> {
    let text = std::fs::read(path).map_err(|error| not_valid(what, path, &error))?;
    serde_json::from_slice(&text).map_err(|error| not_valid(what, path, &error))
}

fn not_valid(what: &str, path: &Path, error: &(dyn std::error::Error + 'static)) -> Fault {
    Fault::of(&format!("{what} {} is not valid", path.display()), error)
}

/// Reports why this process ends.
fn failed(exit: Exit, text: &str) -> Exit {
    log!(Level::Error, "{text}");
    // Standard error may be closed.
    let _ = writeln!(std::io::stderr(), "firn-firecracker: error: {text}");
    exit
}

/// Ends this process from a thread that is not the main one.
fn end(exit: Exit) -> ! {
    std::process::exit(exit.code().into())
}

fn print(text: &str) {
    // Standard output may be closed.
    let _ = writeln!(std::io::stdout(), "{text}");
}
