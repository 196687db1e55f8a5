//! Events for functions, as arguments name them.

use std::io::{self, Read};

use anyhow::Context;

/// The event that an argument names: JSON itself, `@FILE`, or `-` for standard input.
pub(crate) fn read(argument: &str) -> anyhow::Result<String> {
    if argument == "-" {
        let mut text = String::new();
        io::stdin()
            .read_to_string(&mut text)
            .context("cannot read the event from standard input")?;
        return Ok(text);
    }
    match argument.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the event from {path}")),
        None => Ok(argument.to_owned()),
    }
}
