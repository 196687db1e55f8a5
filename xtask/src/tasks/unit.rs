//! Unit tests, and tests of single programs, on this machine or in the lab.
//!
//! Every program is built with the whole workspace selected: with other packages cargo would turn
//! on other features, and compile all of it again.

use crate::step::Step;
use crate::{Result, lab};

use crate::context::Context;

/// Modules of unit tests that require a KVM. `unit-tests` skips them without one, and
/// `monitor-tests` runs them in the lab.
const KVM_MODULES: [&str; 7] =
    ["microvm::", "player::", "floor::", "freeze::", "tier::emulated::", "systor::", "vcpu::state"];

/// The unit test programs with those modules.
const KVM_UNIT_TESTS: [&str; 2] = ["firn_vmm", "firn_bench"];

/// Test programs of the package firn that require a KVM. Without one they pass without a check, and
/// `monitor-tests` runs them in the lab. The program `lost` is in `lab-tests`, because KVM handles
/// its faults differently there.
const KVM_PROGRAMS: [&str; 16] = [
    "bad_profiles",
    "bench",
    "capacity",
    "drift",
    "jail",
    "monitor",
    "network",
    "paged_planners",
    "pager",
    "paper",
    "pool_refusals",
    "profile",
    "signatures",
    "supervisor",
    "thaw",
    "tier",
];

pub(super) fn unit_tests(context: &Context) -> Result<()> {
    let mut step = Step::words("cargo test --workspace");
    if !context.host.kvm {
        step = step.arg("--").args(KVM_MODULES.iter().flat_map(|module| ["--skip", module]));
    }
    context.runner.run(&step)
}

pub(super) fn monitor_tests(context: &Context) -> Result<()> {
    let Context { runner, paths, .. } = context;
    let mut modules = Vec::new();
    for name in KVM_UNIT_TESTS {
        modules.push(runner.build("test --workspace --lib", name)?);
    }
    let mut programs = Vec::new();
    for name in KVM_PROGRAMS {
        programs.push(runner.build(&format!("test --workspace --test {name}"), name)?);
    }
    // Its tests start the program of the same package.
    programs.push(runner.build("test --workspace --test api", "api")?);
    let firecracker = paths.debug().join("firn-firecracker");
    let mut step = lab::run(paths, "--cpus 1 --timeout 3600");
    for program in modules.iter().chain(&programs).chain([&firecracker]) {
        step = step.arg("--in").arg(program);
    }
    let names = |programs: &[std::path::PathBuf]| {
        programs.iter().map(|program| lab::inside(program)).collect::<Vec<_>>().join(" ")
    };
    let script = format!(
        "{}; ln -s {} {}; failed=; for program in {}; do $program --test-threads=1 {} || failed=1; done; \
         for program in {}; do $program --test-threads=1 || failed=1; done; test -z \"$failed\"",
        lab::with_firn(paths),
        lab::inside(&firecracker),
        firecracker.display(),
        names(&modules),
        KVM_MODULES.join(" "),
        names(&programs),
    );
    runner.run(
        &step
            .args(["--env", "FIRN_REQUIRE=kvm,root,disk,cpu_limits", "--", "sh", "-c"])
            .arg(script),
    )
}

pub(super) fn lab_tests(context: &Context) -> Result<()> {
    lab_steps(context)?.iter().try_for_each(|step| context.runner.run(step))
}

/// The steps of `lab-tests`. What they run is built already, or by themselves.
pub(super) fn lab_steps(context: &Context) -> Result<[Step; 3]> {
    let Context { runner, paths, .. } = context;
    let lab = Step::words(
        "cargo test --workspace --test lab --test lab_interrupts --test lab_pool -- --ignored --test-threads=1",
    );
    let memory = runner.build("test --workspace --lib", "firn_memory")?;
    let recorders =
        lab::run(paths, "").arg("--in").arg(&memory).arg("--").arg(lab::inside(&memory));
    let lost = runner.build("test --workspace --test lost", "lost")?;
    let script = format!("{}; {} --test-threads=1", lab::with_firn(paths), lab::inside(&lost));
    let in_lab = lab::run(paths, "--cpus 1 --fsdax").arg("--in").arg(&lost);
    let in_lab = in_lab.args(["--env", "FIRN_REQUIRE=kvm,root,disk,dax", "--", "sh", "-c"]);
    Ok([lab, recorders.args(["--ignored", "bpf::tests::"]), in_lab.arg(script)])
}

/// The tests of SnapBPF's prefetch by the kernel, in a lab with the module.
pub(super) fn snapbpf(context: &Context) -> Result<()> {
    let Context { runner, paths, .. } = context;
    let memory = runner.build("test --workspace --lib", "firn_memory")?;
    let program = runner.build("test --workspace --test snapbpf", "snapbpf")?;
    let script = format!(
        "{}; insmod /in/firn_snapbpf.ko; {} --ignored bpf::prefetch && {} --ignored",
        lab::with_firn(paths),
        lab::inside(&memory),
        lab::inside(&program)
    );
    let step = [&memory, &program, &paths.cache.join("lab/firn_snapbpf.ko")]
        .into_iter()
        .fold(lab::run(paths, "--cpus 1"), |step, file| step.arg("--in").arg(file));
    runner.run(&step.args(["--", "sh", "-c"]).arg(script))
}

#[cfg(test)]
#[path = "unit_tests.rs"]
mod tests;
