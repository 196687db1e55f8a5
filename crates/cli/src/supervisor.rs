//! The monitor that `firn boot` and `firn thaw` run their microVM in.

use anyhow::Context;
use firn_base::monitor_program;
use firn_run::jail::Jail;
use firn_run::monitor::Supervisor;

use crate::host_args::MonitorHostArgs;

/// Starts a monitor. From here on signals end the microVM instead of this process, so nothing that
/// can take long comes between this and [`Supervisor::run`].
pub(crate) fn spawn(arguments: &MonitorHostArgs) -> anyhow::Result<Supervisor> {
    let program = monitor_program().context("cannot find the path of this program")?;
    Ok(Supervisor::spawn(&Jail::new(arguments.jail), &program, &arguments.host.kvm)?)
}
