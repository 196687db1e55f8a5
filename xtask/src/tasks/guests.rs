//! Tests in real guests, under this machine's KVM or in the lab.

use std::path::{Path, PathBuf};

use crate::step::Step;
use crate::{Result, lab};

use super::unit::lab_steps;
use crate::context::Context;

/// Modules that take half of the time, with the tests of the lab. In the lab they run in a machine
/// of their own, beside a second machine with all other tests: under emulation a second processor
/// makes one machine no faster.
const HALF: [&str; 7] = [
    "planners::",
    "pool_thaws::",
    "hugetlbfs::",
    "recording::",
    "dax::",
    "network::",
    "network_clients::",
];

pub(super) fn guest_tests(context: &Context) -> Result<()> {
    beside(context, Vec::new())
}

/// The tests of the lab run in the second machine's time, before its own.
pub(super) fn lab_and_guest_tests(context: &Context) -> Result<()> {
    beside(context, lab_steps(context)?.into())
}

fn beside(context: &Context, mut first: Vec<Step>) -> Result<()> {
    let program = build(context)?;
    let made = [clones_image(context), draws(context), certificates(context)];
    if context.host.hardware {
        first.push(native(context, &program, &made));
        return first.iter().try_for_each(|step| context.runner.run(step));
    }
    let others = HALF.iter().flat_map(|module| ["--skip", module]);
    let lab = || in_lab(context, &program, &made, "4G");
    first.push(lab().args(HALF));
    context.runner.run_beside(&lab().args(others), &first)
}

pub(super) fn long_guest_tests(context: &Context) -> Result<()> {
    let program = build(context)?;
    let made = [
        clones_image(context),
        draws(context),
        certificates(context),
        languages(context),
        s3_server(context),
    ];
    let step = if context.host.hardware {
        native(context, &program, &made)
    } else {
        // One test has a pool of five pages of 1 GiB, and the images are in memory, too.
        in_lab(context, &program, &made, "10G")
    };
    context.runner.run(&step.arg("--ignored"))
}

fn build(context: &Context) -> Result<PathBuf> {
    let place = if context.host.hardware { "under this machine's KVM" } else { "in the lab" };
    let program = context.runner.build("test --workspace --test microvm", "microvm")?;
    context.runner.note(&format!("The guests' tests run {place}."));
    Ok(program)
}

/// What is built for the tests, and the environment variable that names it.
type Made = (&'static str, PathBuf);

/// The root image with the wheels that clones draw random values with.
fn clones_image(context: &Context) -> Made {
    ("FIRN_CLONES_IMAGE", context.paths.target.join("clones.erofs"))
}

/// A function in Rust, which cargo builds with the tests.
fn draws(context: &Context) -> Made {
    ("FIRN_DRAWS_RUST", context.paths.debug().join("draws"))
}

/// The folder with the certificates of servers that clients in guests use.
fn certificates(context: &Context) -> Made {
    ("FIRN_CERTIFICATES", context.paths.target.join("certificates"))
}

/// A server of S3.
fn s3_server(context: &Context) -> Made {
    ("FIRN_S3_SERVER", context.paths.target.join("versitygw"))
}

/// The folder with a root image of several languages, and functions in them.
fn languages(context: &Context) -> Made {
    ("FIRN_LANGUAGES", context.paths.target.join("languages"))
}

fn native(context: &Context, program: &Path, made: &[Made]) -> Step {
    let step = Step::new(program).arg("--test-threads=1").env("FIRN", context.paths.firn());
    made.iter().fold(step, |step, (name, path)| step.env(name, path))
}

fn in_lab(context: &Context, program: &Path, made: &[Made], memory: &str) -> Step {
    let step =
        lab::run(&context.paths, &format!("--memory {memory} --fsdax --cpus 1 --timeout 3600"))
            .arg("--in")
            .arg(program)
            .arg("--in")
            .arg(context.paths.cache.join("clients"))
            .args(["--env", "FIRN_REQUIRE=kvm,root,dax,cpu_limits,tun", "--env", "FIRN=/bin/firn"])
            .args(["--env", "FIRN_CLIENTS=/in/clients"]);
    let step = made.iter().fold(step, |step, (name, path)| {
        step.arg("--in").arg(path).arg("--env").arg(format!("{name}={}", lab::inside(path)))
    });
    step.arg("--").arg(lab::inside(program)).arg("--test-threads=1")
}
