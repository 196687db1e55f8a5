//! Exit codes, as Firecracker has them.

use std::process::ExitCode;

/// How this process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The guest has ended.
    Success,
    /// Something failed.
    Failure,
    /// A system call was denied.
    SystemCall,
    /// The configuration file is not valid, or its microVM did not start.
    Configuration,
    /// The arguments are not valid.
    Arguments,
}

impl Exit {
    /// Its code.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failure => 1,
            Self::SystemCall => 148,
            Self::Configuration => 152,
            Self::Arguments => 153,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}
