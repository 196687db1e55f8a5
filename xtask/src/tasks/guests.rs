//! Tests in real guests, under this machine's KVM or in the lab.

use std::path::{Path, PathBuf};

use crate::step::Step;
use crate::{Result, lab};

use crate::context::Context;

/// Modules that test restores by planner. In the lab they run in a machine of their own, beside a
/// second machine with all other tests: under emulation a second processor makes one machine no
/// faster.
const RESTORES: [&str; 6] =
    ["planners::", "pool_thaws::", "hugetlbfs::", "recording::", "dax::", "shapes::"];

pub(super) fn guest_tests(context: &Context) -> Result<()> {
    let program = build(context)?;
    if context.host.hardware {
        return context.runner.run(&native(context, &program));
    }
    let others = RESTORES.iter().flat_map(|module| ["--skip", module]);
    let lab = || in_lab(context, &program, "4G");
    context.runner.run_both(&lab().args(others), &lab().args(RESTORES))
}

pub(super) fn long_guest_tests(context: &Context) -> Result<()> {
    let program = build(context)?;
    let step = if context.host.hardware {
        native(context, &program)
    } else {
        // One test has a pool of five pages of 1 GiB.
        in_lab(context, &program, "9G")
    };
    context.runner.run(&step.arg("--ignored"))
}

fn build(context: &Context) -> Result<PathBuf> {
    let place = if context.host.hardware { "under this machine's KVM" } else { "in the lab" };
    let program = context.runner.build("test -p firn-tests --test microvm", "microvm")?;
    context.runner.note(&format!("The guests' tests run {place}."));
    Ok(program)
}

/// The root image with the wheels that clones draw random values with, as the Makefile builds it.
fn clones_image(context: &Context) -> PathBuf {
    context.paths.target.join("clones.erofs")
}

fn native(context: &Context, program: &Path) -> Step {
    Step::new(program)
        .arg("--test-threads=1")
        .env("FIRN", context.paths.firn())
        .env("FIRN_CLONES_IMAGE", clones_image(context))
}

fn in_lab(context: &Context, program: &Path, memory: &str) -> Step {
    let image = clones_image(context);
    lab::run(&context.paths, &format!("--memory {memory} --fsdax --cpus 1 --timeout 3600"))
        .arg("--in")
        .arg(program)
        .arg("--in")
        .arg(context.paths.cache.join("clients"))
        .arg("--in")
        .arg(&image)
        .args(["--env", "FIRN_REQUIRE=kvm,root,dax,cpu_limits", "--env", "FIRN=/bin/firn"])
        .args(["--env", "FIRN_CLIENTS=/in/clients", "--env"])
        .arg(format!("FIRN_CLONES_IMAGE={}", lab::inside(&image)))
        .arg("--")
        .arg(lab::inside(program))
        .arg("--test-threads=1")
}
