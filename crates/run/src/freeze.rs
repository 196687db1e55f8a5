//! A running microVM into a snapshot, from outside of its monitor.

use std::time::{Duration, Instant};

use firn_base::ns_since;
use firn_snapshot::{
    Destination, FreezeReport, FreezeRequest, FunctionInfo, NotFrozenError, Signer, freeze_signed,
};
use firn_vmm::{ControlClient, ControlError, Request};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::agent::{AgentClient, ConnectError, IdentifyError, PrepareFreezeError, StatusError};
use crate::identity::{Identity, IdentityError};
use crate::instance::Instance;

/// How long a guest may take to prepare for its freeze, or to take a new identity.
const GUEST_LIMIT: Duration = Duration::from_secs(60);

/// How long the guest's kernel postpones what is left of the agent's connection (callbacks of RCU):
/// otherwise every clone frees it.
const SETTLING: Duration = Duration::from_millis(40);

/// Why a microVM was not frozen. It runs on, if it still can.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FreezeInstanceError {
    /// The agent cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The agent does not report its state.
    #[error(transparent)]
    Status(#[from] StatusError),
    /// The guest did not prepare.
    #[error(transparent)]
    Prepare(#[from] PrepareFreezeError),
    /// The monitor cannot be reached.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The snapshot was not written.
    #[error(transparent)]
    Freeze(#[from] NotFrozenError<ControlError>),
    /// The kernel gave no random bytes for an identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The guest that runs on did not take its new identity.
    #[error(transparent)]
    Identify(#[from] IdentifyError),
}

/// What a freeze did. Its JSON is part of that of `firn freeze --json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct FreezeInstanceReport {
    /// Preparing the guest, ns.
    pub prepare_ns: u64,
    /// All of it, until the snapshot is in its place, ns.
    pub total_ns: u64,
    /// The parts of the freeze.
    #[serde(flatten)]
    pub report: FreezeReport,
}

/// Freezes a running microVM: this process makes the files or the extent, passes them to the
/// monitor, and publishes the snapshot. The microVM ends with that, unless `keep` lets it run on as
/// one that differs from the clones of its snapshot. `dense` writes zero pages too. The snapshot is
/// signed if there is a signer.
///
/// # Errors
/// See [`FreezeInstanceError`].
pub fn freeze(
    instance: &Instance,
    destination: Destination,
    dense: bool,
    keep: bool,
    signer: Option<&Signer>,
) -> Result<FreezeInstanceReport, FreezeInstanceError> {
    let begin = Instant::now();
    let mut control = ControlClient::connect(&instance.control_socket())?;
    let mut agent = AgentClient::connect(&instance.vsock_socket(), GUEST_LIMIT)?;
    let status = agent.status()?;
    let function = status.function.zip(status.handler);
    let function = function.map(|(name, handler)| FunctionInfo { name, handler });
    let request = FreezeRequest { destination, dense, function };
    let frozen = prepare_and_freeze(agent, &mut control, request, signer);
    let total_ns = ns_since(begin);
    if keep || frozen.is_err() {
        let resumed = resume(&mut control, instance);
        // The first failure is the one to report.
        if frozen.is_ok() {
            resumed?;
        }
    } else {
        control.stop()?;
    }
    let (prepared, report) = frozen?;
    let prepare_ns = firn_base::nanoseconds(prepared - begin);
    Ok(FreezeInstanceReport { prepare_ns, total_ns, report })
}

/// Returns when the guest was ready, and what the freeze wrote.
fn prepare_and_freeze(
    agent: AgentClient,
    control: &mut ControlClient,
    request: FreezeRequest,
    signer: Option<&Signer>,
) -> Result<(Instant, FreezeReport), FreezeInstanceError> {
    agent.prepare_freeze(GUEST_LIMIT)?;
    std::thread::sleep(SETTLING);
    let prepared = Instant::now();
    Ok((prepared, freeze_signed(control, request, signer)?))
}

/// Lets a paused microVM run on with a new identity.
fn resume(control: &mut ControlClient, instance: &Instance) -> Result<(), FreezeInstanceError> {
    let identity = Identity::fresh()?;
    control.request(&Request::Resume { generation: identity.generation })?;
    let mut agent = AgentClient::connect(&instance.vsock_socket(), GUEST_LIMIT)?;
    Ok(agent.identify(&identity, GUEST_LIMIT)?)
}
