//! The end of a guest's console, in an error.

use firn_vmm::Console;
use serde::{Deserialize, Serialize};

/// Lines of the guest's console that an error reports.
/// A panic of Linux, from its reason to its last line, has about 50.
const CONSOLE_LINES: usize = 60;

/// The end of the guest's console output, for an error's text.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ConsoleTail(String);

impl ConsoleTail {
    pub(crate) fn of(console: &Console) -> Self {
        Self(console.tail(CONSOLE_LINES))
    }
}

impl std::fmt::Display for ConsoleTail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            write!(f, "; its console is empty")
        } else {
            write!(f, "; the end of its console:\n  {}", self.0.replace('\n', "\n  "))
        }
    }
}
