//! Every function behind the daemon, on its image. Under emulation this takes long
//! (docs/reference/workloads.md).

use std::path::Path;

use crate::step::Step;
use crate::{Result, lab};

use crate::context::Context;

/// 1,000 requests to the daemon; then every function, and an image with a user's own packages. That
/// image is built each time, from the sources that this computer's apt and pip are configured with.
pub(super) fn test(context: &Context) -> Result<()> {
    let Context { runner, paths, host } = context;
    let microvm = runner.build("test --workspace --test microvm", "microvm")?;
    let step = if host.hardware {
        Step::new(&microvm).env("FIRN", paths.firn()).env("FIRN_INVOCATIONS", "1000")
    } else {
        lab::run(paths, "--timeout 3600")
            .arg("--in")
            .arg(&microvm)
            .args(["--env", "FIRN=/bin/firn", "--env", "FIRN_INVOCATIONS=1000", "--"])
            .arg(lab::inside(&microvm))
    };
    runner.run(&step.arg("serve::crashes"))?;

    let workloads = runner.build("test --workspace --test workloads", "workloads")?;
    let own = std::env::temp_dir().join(format!("own-{}.erofs", std::process::id()));
    let result = with_own_image(context, &workloads, &own);
    if own.exists() {
        std::fs::remove_file(own)?;
    }
    result
}

fn with_own_image(context: &Context, workloads: &Path, own: &Path) -> Result<()> {
    let Context { runner, paths, host } = context;
    runner.run(
        &Step::new(paths.firn())
            .args(["image", "build", "--packages", "python3-yaml", "--requirements"])
            .arg("tests/functions/own_image/requirements.txt")
            .arg("--out")
            .arg(own),
    )?;
    let step = if host.hardware {
        Step::new(workloads)
            .env("FIRN", paths.firn())
            .env("FIRN_FUNCTIONS", paths.root.join("guest/functions"))
            .env("FIRN_OWN_IMAGE", own)
    } else {
        lab::run(paths, "--timeout 7200")
            .arg("--in")
            .arg(workloads)
            .args(["--in", "guest/functions", "--in"])
            .arg(own)
            .args(["--env", "FIRN=/bin/firn", "--env", "FIRN_FUNCTIONS=/in/functions", "--env"])
            .arg(format!("FIRN_OWN_IMAGE={}", lab::inside(own)))
            .arg("--")
            .arg(lab::inside(workloads))
    };
    runner.run(&step.args(["--test-threads=1", "--nocapture"]))
}
