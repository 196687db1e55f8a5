//! Checks of the source code that run no tests.

use crate::context::Context;
use crate::host::has_program;
use crate::step::Step;
use crate::{Result, prose, unused};

pub(super) fn lint(context: &Context) -> Result<()> {
    let runner = &context.runner;
    runner.run(&Step::words("cargo fmt --check"))?;
    runner.run(&Step::words("cargo clippy --workspace --all-targets -- -D warnings"))?;
    // The monitor of the tests under load.
    runner.run(&Step::words(
        "cargo clippy --workspace --features firn-run/player-agent -- -D warnings",
    ))?;
    let doc = Step::words("cargo doc --workspace --no-deps --document-private-items --quiet");
    runner.run(&doc.env("RUSTDOCFLAGS", "-D warnings"))?;
    unused::check(context)?;
    prose::check(context)
}

/// cargo-deny: licences, versions, sources and advisories.
pub(super) fn deny(context: &Context) -> Result<()> {
    if !has_program("cargo-deny") && !context.runner.is_dry() {
        return Err(
            "cargo-deny is missing; install it with: cargo install --locked cargo-deny".into()
        );
    }
    context.runner.run(&Step::words("cargo deny check"))
}
