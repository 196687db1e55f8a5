//! A client's side of the control socket.

use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use firn_base::num::u64_of;
use firn_snapshot::{Begin, Begun, Freeze, FreezeReport, Seal};
use thiserror::Error;

use super::{MAX_LINE, Request, Response, wire};

/// Why a request to a monitor failed.
#[derive(Debug, Error)]
pub enum ControlError {
    /// No process listens: the microVM has ended.
    #[error("no microVM answers on {0}: it has ended, or it never started")]
    Gone(PathBuf),
    /// The connection broke before the response.
    #[error("the microVM on {0} ended before it answered")]
    Ended(PathBuf),
    /// The socket cannot be used.
    #[error("cannot communicate with the microVM on {path}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The response is invalid.
    #[error("the response of the monitor on {path} is not valid for this version of firn")]
    Answer {
        /// The socket.
        path: PathBuf,
        /// Why it is invalid.
        source: serde_json::Error,
    },
    /// The response is one to another request.
    #[error("the response of the monitor on {0} does not belong to the request")]
    Mismatch(PathBuf),
    /// The request failed in the monitor.
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
    /// [`ControlError::Gone`] if no process listens on `path`.
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

    /// Sends a request and waits for its response.
    ///
    /// # Errors
    /// See [`ControlError`]; an error of the monitor is [`ControlError::Refused`].
    pub fn request(&mut self, request: &Request) -> Result<Response, ControlError> {
        self.request_with(request, &[])
    }

    /// The same with descriptors. The kernel closes descriptors that come with the response,
    /// because it is read without them.
    fn request_with(
        &mut self,
        request: &Request,
        descriptors: &[OwnedFd],
    ) -> Result<Response, ControlError> {
        wire::send(self.stream.get_ref(), request, descriptors)
            .map_err(|source| self.socket_error(source))?;
        let mut line = Vec::new();
        let read = self.stream.by_ref().take(u64_of(MAX_LINE)).read_until(b'\n', &mut line);
        read.map_err(|source| self.socket_error(source))?;
        if line.is_empty() {
            return Err(ControlError::Ended(self.path.clone()));
        }
        match serde_json::from_slice(&line).map_err(|source| self.invalid_response(source))? {
            Response::Error { message } => Err(ControlError::Refused(message)),
            response => Ok(response),
        }
    }

    /// Ends the microVM and waits for the end of its monitor's process, which must not be this
    /// process.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn stop(mut self) -> Result<(), ControlError> {
        match self.request(&Request::Stop) {
            // The process may end before it responds.
            Ok(_) | Err(ControlError::Ended(_)) => {}
            Err(error) => return Err(error),
        }
        match io::copy(&mut self.stream, &mut io::sink()) {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => {
                Err(self.socket_error(error))
            }
            _ => Ok(()),
        }
    }

    fn invalid_response(&self, source: serde_json::Error) -> ControlError {
        ControlError::Answer { path: self.path.clone(), source }
    }

    fn socket_error(&self, source: io::Error) -> ControlError {
        match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                ControlError::Ended(self.path.clone())
            }
            _ => ControlError::Socket { path: self.path.clone(), source },
        }
    }
}

/// The client is the supervisor of the freeze of another process's microVM.
impl Freeze for ControlClient {
    type Error = ControlError;

    fn write(&mut self, begin: Begin, files: Vec<OwnedFd>) -> Result<Begun, ControlError> {
        match self.request_with(&Request::Freeze(begin), &files)? {
            Response::Begun { begun } => Ok(begun),
            _ => Err(ControlError::Mismatch(self.path.clone())),
        }
    }

    fn seal(&mut self, seal: Seal, files: Vec<OwnedFd>) -> Result<FreezeReport, ControlError> {
        match self.request_with(&Request::Seal { seal }, &files)? {
            Response::Sealed(report) => Ok(*report),
            _ => Err(ControlError::Mismatch(self.path.clone())),
        }
    }

    fn connection(&self) -> io::Result<Option<UnixStream>> {
        self.stream.get_ref().try_clone().map(Some)
    }
}
