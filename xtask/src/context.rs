//! What every task works with.

use crate::host::Host;
use crate::paths::Paths;
use crate::runner::Runner;

/// What a task works with.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) runner: Runner,
    pub(crate) host: Host,
    pub(crate) paths: Paths,
}
