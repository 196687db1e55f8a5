//! A client's side of the control socket.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{MAX_LINE, Request, Response};

/// Why a request to a monitor failed.
#[derive(Debug, Error)]
pub enum ControlError {
    /// Nobody listens: the microVM is gone.
    #[error("no microVM answers on {0}: it has ended, or it never started")]
    Gone(PathBuf),
    /// The connection broke before the answer.
    #[error("the microVM on {0} ended before it answered")]
    Ended(PathBuf),
    /// Talking to the socket failed.
    #[error("talking to the microVM on {path}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The answer is not one of ours.
    #[error("the monitor on {path} gave an answer that this firn does not understand")]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The monitor refused.
    #[error("{0}")]
    Refused(String),
}

/// A connection to a microVM's monitor.
#[derive(Debug)]
pub struct ControlClient {
    path: PathBuf,
    stream: BufReader<UnixStream>,
}

impl ControlClient {
    /// Connects to a monitor.
    ///
    /// # Errors
    /// [`ControlError::Gone`] when nobody listens on `path`.
    pub fn connect(path: &Path) -> Result<Self, ControlError> {
        match UnixStream::connect(path) {
            Ok(stream) => Ok(Self { path: path.to_owned(), stream: BufReader::new(stream) }),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                Err(ControlError::Gone(path.to_owned()))
            }
            Err(source) => Err(ControlError::Socket { path: path.to_owned(), source }),
        }
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// See [`ControlError`]; a refusal by the monitor is [`ControlError::Refused`].
    pub fn request(&mut self, request: &Request) -> Result<Response, ControlError> {
        let mut text = serde_json::to_vec(request).map_err(|source| self.not_understood(source))?;
        text.push(b'\n');
        self.stream.get_mut().write_all(&text).map_err(|source| self.broken(source))?;
        let mut line = Vec::new();
        let read = self.stream.by_ref().take(MAX_LINE).read_until(b'\n', &mut line);
        read.map_err(|source| self.broken(source))?;
        if line.is_empty() {
            return Err(ControlError::Ended(self.path.clone()));
        }
        match serde_json::from_slice(&line).map_err(|source| self.not_understood(source))? {
            Response::Error { message } => Err(ControlError::Refused(message)),
            response => Ok(response),
        }
    }

    /// Ends the microVM and waits for the end of its monitor's process, which must be another one
    /// than this.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn stop(mut self) -> Result<(), ControlError> {
        match self.request(&Request::Stop) {
            // The process may be faster at ending than at answering.
            Ok(_) | Err(ControlError::Ended(_)) => {}
            Err(error) => return Err(error),
        }
        match io::copy(&mut self.stream, &mut io::sink()) {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => Err(self.broken(error)),
            _ => Ok(()),
        }
    }

    fn not_understood(&self, source: serde_json::Error) -> ControlError {
        ControlError::Answer { path: self.path.clone(), source }
    }

    fn broken(&self, source: io::Error) -> ControlError {
        match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                ControlError::Ended(self.path.clone())
            }
            _ => ControlError::Socket { path: self.path.clone(), source },
        }
    }
}
