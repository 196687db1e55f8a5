//! The monitor's side of the control socket.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use firn_base::error_chain;
use thiserror::Error;
use uuid::Uuid;

use super::{MAX_LINE, Request, Response, Status};
use crate::microvm::{FreezeRequest, GoneError, Handle, Microvm};

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
    let mut paused = false;
    // An error means that the client disconnected.
    let _ = answer_all(stream, handle, &mut paused);
    if paused {
        answer(Request::Resume { generation: Uuid::new_v4() }, handle);
    }
}

fn answer_all(stream: &UnixStream, handle: &Handle, paused: &mut bool) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        let response = match serde_json::from_slice(&line) {
            Ok(request) => {
                *paused = match request {
                    Request::Freeze { .. } => true,
                    Request::Resume { .. } | Request::Stop => false,
                    Request::Status => *paused,
                };
                answer(request, handle)
            }
            Err(error) => Response::Error { message: format!("not a control request: {error}") },
        };
        let mut text = serde_json::to_vec(&response)?;
        text.push(b'\n');
        let mut writer = stream;
        writer.write_all(&text)?;
    }
}

fn answer(request: Request, handle: &Handle) -> Response {
    let answer = match request {
        Request::Status => handle.call(status),
        Request::Freeze { destination, dense, function } => handle.call(move |microvm| {
            let request = FreezeRequest { destination, dense, function };
            match microvm.freeze(request) {
                Ok(report) => Response::Frozen(Box::new(report)),
                Err(error) => error_response(&error),
            }
        }),
        Request::Resume { generation } => {
            handle.call(move |microvm| match microvm.renew_generation(generation) {
                Ok(()) => match microvm.resume() {
                    Ok(()) => Response::Done,
                    Err(error) => error_response(&error),
                },
                Err(error) => error_response(&error),
            })
        }
        Request::Stop => handle.call(|microvm| {
            microvm.stop();
            Response::Done
        }),
    };
    answer.unwrap_or_else(|error: GoneError| error_response(&error))
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

fn error_response(error: &dyn std::error::Error) -> Response {
    Response::Error { message: error_chain(error) }
}
