//! `firn standby`: a firn that is started, has KVM open, and waits to be told what to thaw.
//!
//! The daemon keeps a few. One reads its order, one line of JSON, from standard input, and then is `firn thaw` with the order's
//! arguments. It ends when standard input ends without one: whoever started it has gone.

use std::ffi::OsString;
use std::io::{self, BufRead};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser};
use thiserror::Error;

use firn_base::now_ns;
use firn_control::ThawOrder;
use firn_vmm::{KVM_DEVICE, OpenKvm};

use super::thaw::{self, Begun, ThawArgs, ThawCommandError};

/// Arguments of `firn standby`.
#[derive(Debug, Args)]
pub(crate) struct StandbyArgs {
    /// The KVM device
    #[arg(long, value_name = "DEVICE", default_value = KVM_DEVICE)]
    kvm: PathBuf,
}

/// The arguments of an order.
#[derive(Debug, Parser)]
struct Ordered {
    #[command(flatten)]
    thaw: ThawArgs,
}

/// Why an order was not carried out.
#[derive(Debug, Error)]
pub(crate) enum StandbyError {
    #[error("reading the order")]
    Read(#[source] io::Error),
    #[error("the order is none")]
    Order(#[source] serde_json::Error),
    #[error("the order's arguments are none of firn thaw: is the daemon of another version?")]
    Arguments(#[source] clap::Error),
    #[error(transparent)]
    Thaw(#[from] ThawCommandError),
}

pub(crate) fn run(arguments: &StandbyArgs) -> Result<ExitCode, StandbyError> {
    // Where that fails, the order tries again and says why.
    let kvm = OpenKvm::open(&arguments.kvm).ok();
    let mut line = String::new();
    if io::stdin().lock().read_line(&mut line).map_err(StandbyError::Read)? == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let at = now_ns();
    let order: ThawOrder = serde_json::from_str(&line).map_err(StandbyError::Order)?;
    let words = [OsString::from("firn thaw")].into_iter().chain(order.arguments);
    let ordered = Ordered::try_parse_from(words).map_err(StandbyError::Arguments)?;
    let begun = Begun { at, request: Some(order.request_ns), kvm };
    Ok(thaw::run(&ordered.thaw, begun)?)
}
