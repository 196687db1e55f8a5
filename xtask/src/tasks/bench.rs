//! How a thaw's own work grows with guest memory.

use crate::step::Step;
use crate::{Result, lab};

use crate::context::Context;

/// Measures thaws of a small and a large guest. With a KVM it also compares the player with a bare
/// loop, and the planners with each other.
pub(super) fn bench(context: &Context) -> Result<()> {
    let Context { runner, paths, host } = context;
    let program = runner.build("bench -p firn --bench thaw_growth", "thaw_growth")?;
    let place = if host.hardware {
        "under this machine's KVM"
    } else {
        "in the lab, where only the ratio is meaningful"
    };
    runner.note(&format!("The benchmark runs {place}."));
    let step = if host.hardware {
        Step::new(&program).env("FIRN", paths.firn()).env("FIRN_FUNCTIONS", "guest/functions")
    } else {
        lab::run(paths, "")
            .arg("--in")
            .arg(&program)
            .args(["--in", "guest/functions", "--env", "FIRN=/bin/firn"])
            .args(["--env", "FIRN_FUNCTIONS=/in/functions", "--"])
            .arg(lab::inside(&program))
    };
    runner.run(&step.arg("--bench"))?;
    if !host.kvm {
        return Ok(());
    }
    let firn = || Step::new(paths.firn()).arg("bench");
    runner.run(&firn().arg("floor"))?;
    if host.root {
        runner.run(&firn().args(["floor", "--leaves", "2m"]))?;
    }
    runner.run(&firn().args(["thaw", "--trace", "sequential-read:64M", "--runs", "10"]))
}
