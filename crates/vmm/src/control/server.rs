//! The monitor's side of the control socket.

use std::error::Error;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Sender, channel};

use firn_base::error_chain;
use firn_snapshot::{Begin, Freeze, FreezeError, Seal};
use thiserror::Error;
use uuid::Uuid;

use super::wire::{Lines, send};
use super::{Request, Response, Status};
use crate::microvm::{GoneError, Handle, Microvm};

/// The thread of the control socket cannot be started.
#[derive(Debug, Error)]
#[error("cannot start the thread of the control socket")]
pub struct ControlServerError(#[source] io::Error);

/// Serves the microVM behind `handle` on a bound control socket, in threads of its own, until the
/// process ends.
///
/// # Errors
/// No thread can be started.
pub fn serve_control(listener: UnixListener, handle: Handle) -> Result<(), ControlServerError> {
    let spawned = std::thread::Builder::new()
        .name("control".into())
        .spawn(move || accept(&listener, &handle));
    spawned.map(drop).map_err(ControlServerError)
}

fn accept(listener: &UnixListener, handle: &Handle) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        let handle = handle.clone();
        // Without a thread the connection is closed, which the client reports.
        let _ = std::thread::Builder::new()
            .name("control-client".into())
            .spawn(move || serve(&stream, &handle));
    }
}

/// Serves one connection until it ends or breaks. A microVM that its client left paused is resumed.
fn serve(stream: &UnixStream, handle: &Handle) {
    let mut session = Session { handle, paused: false, sealing: None };
    // An error means that the client disconnected.
    let _ = session.answer_all(stream);
    if session.paused {
        session.answer(Request::Resume { generation: Uuid::new_v4() }, Vec::new());
    }
}

/// The second step of a freeze, and where its response goes.
type Sealing = (Seal, Vec<OwnedFd>, Sender<Response>);

/// One connection.
struct Session<'a> {
    handle: &'a Handle,
    paused: bool,
    /// The microVM's thread, which has taken the first step of a freeze and waits for the second.
    sealing: Option<Sender<Sealing>>,
}

impl Session<'_> {
    fn answer_all(&mut self, stream: &UnixStream) -> io::Result<()> {
        let mut lines = Lines::of(stream);
        loop {
            let (line, descriptors) = match lines.next() {
                Ok(Some(line)) => line,
                Ok(None) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return send(stream, &not_a_request(&error), &[]);
                }
                Err(error) => return Err(error),
            };
            let response = match serde_json::from_slice(&line) {
                Ok(request) => self.answer(request, descriptors),
                Err(error) => not_a_request(&error),
            };
            send(stream, &response, &[])?;
        }
    }

    fn answer(&mut self, request: Request, descriptors: Vec<OwnedFd>) -> Response {
        let answer = match request {
            Request::Freeze(begin) => self.freeze(begin, descriptors),
            Request::Seal { seal } => self.seal(seal, descriptors),
            _ if !descriptors.is_empty() => {
                let message = "this request takes no descriptors".to_owned();
                Ok(Response::Error { message })
            }
            Request::Status => self.handle().call(status),
            Request::Resume { generation } => {
                self.paused = false;
                self.handle().call(move |microvm| match microvm.renew_generation(generation) {
                    Ok(()) => match microvm.resume() {
                        Ok(()) => Response::Done,
                        Err(error) => error_response(&error),
                    },
                    Err(error) => error_response(&error),
                })
            }
            Request::Stop => {
                self.paused = false;
                self.handle().call(|microvm| {
                    microvm.stop();
                    Response::Done
                })
            }
        };
        answer.unwrap_or_else(|error: GoneError| error_response(&error))
    }

    /// The microVM, whose thread answers no request while it waits for the second step of a freeze.
    fn handle(&mut self) -> &Handle {
        self.sealing = None;
        self.handle
    }

    /// Takes the first step of a freeze. Then the microVM's thread waits for the second one, or for
    /// another request or the end of this connection: devices that served the guest between the
    /// steps would change memory whose state is saved.
    fn freeze(&mut self, begin: Begin, files: Vec<OwnedFd>) -> Result<Response, GoneError> {
        self.paused = true;
        let (answer, receiver) = channel();
        let (sealing, seals) = channel::<Sealing>();
        self.handle().post(move |microvm| {
            let begun = match microvm.write(begin, files) {
                Ok(begun) => Response::Begun { begun },
                Err(error) => return drop(answer.send(error_response(&error))),
            };
            let _ = answer.send(begun);
            let Ok((seal, files, answer)) = seals.recv() else { return };
            let _ = answer.send(match microvm.seal(seal, files) {
                Ok(report) => Response::Sealed(Box::new(report)),
                Err(error) => error_response(&error),
            });
        })?;
        let response = receiver.recv().map_err(|_| GoneError)?;
        // After a failure the microVM's thread does not wait, even if it is still about to go on.
        self.sealing = Some(sealing).filter(|_| matches!(response, Response::Begun { .. }));
        Ok(response)
    }

    /// Takes the second step. Without a first step, or when it failed, nothing waits for it.
    fn seal(&mut self, seal: Seal, files: Vec<OwnedFd>) -> Result<Response, GoneError> {
        let (answer, receiver) = channel();
        let waiting = self.sealing.take();
        match waiting.and_then(|waiting| waiting.send((seal, files, answer)).ok()) {
            Some(()) => receiver.recv().map_err(|_| GoneError),
            None => Ok(error_response(&FreezeError::NotBegun)),
        }
    }
}

fn not_a_request(error: &dyn Error) -> Response {
    Response::Error { message: format!("not a control request: {error}") }
}

fn status(microvm: &mut Microvm) -> Response {
    let usage = match microvm.memory_usage() {
        Ok(usage) => usage,
        Err(error) => return error_response(&error),
    };
    match microvm.kvm_stats() {
        Ok(kvm) => Response::Status(Box::new(Status {
            memory: microvm.memory().layout().total_bytes(),
            private: usage.private,
            shared: usage.shared,
            kvm,
            device_errors: microvm.device_errors(),
        })),
        Err(error) => error_response(&error),
    }
}

fn error_response(error: &dyn Error) -> Response {
    Response::Error { message: error_chain(error) }
}
