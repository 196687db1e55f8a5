//! Errors with their causes: as one line of text, and as a value that another process can read.

use std::error::Error;
use std::iter::successors;

use serde::{Deserialize, Serialize};

/// Most errors that an [`ErrorChain`] holds. The bound limits what a chain from another process
/// costs.
const MAX_LENGTH: usize = 32;

/// The text of an error and the texts of its causes, separated by colons.
#[must_use]
pub fn error_chain(error: &dyn Error) -> String {
    texts(error).collect::<Vec<_>>().join(": ")
}

fn texts(error: &dyn Error) -> impl Iterator<Item = String> {
    successors(Some(error), |&error| error.source()).map(ToString::to_string)
}

/// An error and its causes as owned texts, to send an error from one process to another.
///
/// It implements [`Error`]: its text is the outermost error's text, and
/// [`source`](Error::source) returns the cause. Its serialised form is the list of texts, the
/// outermost error first.
///
/// ```
/// use firn_base::{ErrorChain, error_chain};
///
/// let number = "x".parse::<u32>().unwrap_err();
/// let chain = ErrorChain::of(&number);
/// assert_eq!(error_chain(&chain), error_chain(&number));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct ErrorChain {
    text: String,
    source: Option<Box<ErrorChain>>,
}

/// A serialised [`ErrorChain`] has no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the error chain is empty")]
pub struct EmptyErrorChain;

impl ErrorChain {
    /// An error without a cause.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), source: None }
    }

    /// The texts of `error` and of its causes.
    #[must_use]
    pub fn of(error: &dyn Error) -> Self {
        let cause = error.source().map_or_else(Vec::new, |cause| texts(cause).collect());
        Self::with_causes(error.to_string(), cause)
    }

    fn with_causes(text: String, mut causes: Vec<String>) -> Self {
        causes.truncate(MAX_LENGTH - 1);
        let source = causes.into_iter().rev().fold(None, |source, text| {
            let error = Self { text, source };
            Some(Box::new(error))
        });
        Self { text, source }
    }
}

impl TryFrom<Vec<String>> for ErrorChain {
    type Error = EmptyErrorChain;

    fn try_from(mut texts: Vec<String>) -> Result<Self, EmptyErrorChain> {
        if texts.is_empty() {
            return Err(EmptyErrorChain);
        }
        let causes = texts.split_off(1);
        let text = texts.pop().ok_or(EmptyErrorChain)?;
        Ok(Self::with_causes(text, causes))
    }
}

impl From<ErrorChain> for Vec<String> {
    fn from(chain: ErrorChain) -> Self {
        texts(&chain).collect()
    }
}

#[cfg(test)]
#[path = "error_chain_tests.rs"]
mod tests;
