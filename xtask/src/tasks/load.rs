//! Many requests to the daemon beside random kills: with players on this machine, with Linux guests
//! here or in the lab.

use std::path::{Path, PathBuf};

use crate::context::Context;
use crate::step::Step;
use crate::{Result, lab};

const PLAYERS: &str = "10000";
const GUESTS: u64 = 1000;
/// Labs that share the requests to guests, each with kills of its own. QEMU's emulation of nested
/// guests does not last for all of them: with two processors the lab's own kernel overflows its
/// stack within a quarter of an hour, and with one it has lasted for twenty minutes.
const LABS: u64 = 4;
const SHORT: &str = "500";
/// The test of the requests. That of leaks sends few, to players; under emulation it would take an
/// hour.
const REQUESTS: &str = "requests_beside_kills";
const MANAGER: &str = "a_killed_manager";
const SIGNED: &str = "without_its_signature";

pub(super) fn test(context: &Context) -> Result<()> {
    let Context { runner, paths, host } = context;
    let load = program(context)?;
    players(context, &load, PLAYERS, &[])?;
    if host.hardware {
        let guests = on_this_machine(&load, &paths.firn()).env("FIRN_REQUESTS", GUESTS.to_string());
        return runner.run(&guests.arg(REQUESTS));
    }
    for seed in 1..=LABS {
        let guests = lab::run(paths, "--memory 8G --cpus 1 --timeout 3600 --in")
            .arg(&load)
            .args(["--env", "FIRN=/bin/firn", "--env"])
            .arg(format!("FIRN_REQUESTS={}", GUESTS / LABS))
            .arg("--env")
            .arg(format!("FIRN_SEED={seed}"))
            .arg("--")
            .arg(lab::inside(&load))
            .args(["--test-threads=1", "--nocapture", REQUESTS]);
        runner.run(&guests)?;
    }
    Ok(())
}

/// Fewer requests, with players only.
pub(super) fn short(context: &Context) -> Result<()> {
    players(context, &program(context)?, SHORT, &[REQUESTS, MANAGER, SIGNED])
}

fn program(context: &Context) -> Result<PathBuf> {
    context.runner.build("test --workspace --test load", "load")
}

fn players(context: &Context, load: &Path, requests: &str, tests: &[&str]) -> Result<()> {
    let Context { runner, paths, host } = context;
    if !host.kvm {
        runner.note("The requests to players are skipped: they require /dev/kvm.");
        return Ok(());
    }
    let build =
        "cargo build --workspace --bin firn --bin firn-monitor --features firn/player-agent";
    runner.run(&Step::words(build))?;
    // Another build without the feature would replace them.
    let folder = paths.target.join("player-agent");
    if !runner.is_dry() {
        std::fs::create_dir_all(&folder)?;
        for program in ["firn", "firn-monitor"] {
            std::fs::copy(paths.debug().join(program), folder.join(program))?;
        }
    }
    let players = on_this_machine(load, &folder.join("firn")).env("FIRN_PLAYER", "1");
    runner.run(&players.env("FIRN_REQUESTS", requests).args(tests))
}

fn on_this_machine(load: &Path, firn: &Path) -> Step {
    Step::new(load).args(["--test-threads=1", "--nocapture"]).env("FIRN", firn)
}
