//! Events for functions, as arguments name them.

use std::io::{self, Read};
use std::path::PathBuf;

use thiserror::Error;

/// Why an event cannot be read.
#[derive(Debug, Error)]
pub(crate) enum ReadEventError {
    /// Its file cannot be read.
    #[error("reading the event from {path}")]
    File { path: PathBuf, source: io::Error },
    /// Standard input cannot be read.
    #[error("reading the event from standard input")]
    Input(#[source] io::Error),
}

/// The event that an argument names: JSON itself, `@FILE`, or `-` for standard input.
pub(crate) fn read(argument: &str) -> Result<String, ReadEventError> {
    if argument == "-" {
        let mut text = String::new();
        io::stdin().read_to_string(&mut text).map_err(ReadEventError::Input)?;
        return Ok(text);
    }
    match argument.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path)
            .map_err(|source| ReadEventError::File { path: path.into(), source }),
        None => Ok(argument.to_owned()),
    }
}
