//! The programs that cargo builds.

use std::path::PathBuf;

use serde_json::Value;

use crate::step::Step;

/// The command that builds the programs of a cargo command and names them.
pub(crate) fn build_step(cargo_command: &str) -> Step {
    Step::new("cargo")
        .args(cargo_command.split(' '))
        .args(["--no-run", "--message-format=json-render-diagnostics"])
}

/// The program that cargo's messages name last for the target `name`.
pub(crate) fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages
        .filter(|message| message["target"]["name"] == name)
        .filter_map(|message| Some(PathBuf::from(message["executable"].as_str()?)))
        .next_back()
}

#[cfg(test)]
#[path = "cargo_tests.rs"]
mod tests;
