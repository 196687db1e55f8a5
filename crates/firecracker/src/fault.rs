//! What a client gets instead of what it wanted.

use std::error::Error;

use firn_base::error_chain;
use hyper::StatusCode;

/// An error answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Its status.
    pub(crate) status: StatusCode,
    /// Its `fault_message`.
    pub(crate) message: String,
}

impl Fault {
    /// A request that is not valid, or that cannot be carried out.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.into() }
    }

    /// The same with what failed and its causes.
    pub(crate) fn of(action: &str, error: &(dyn Error + 'static)) -> Self {
        Self::new(format!("{action}: {}", error_chain(error)))
    }
}

impl<E: Error + 'static> From<E> for Fault {
    fn from(error: E) -> Self {
        Self::new(error_chain(&error))
    }
}
