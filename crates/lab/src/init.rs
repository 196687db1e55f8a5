//! The lab's init in L1: runs the caller's command and sends back its output, results and exit
//! code.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use thiserror::Error;

use crate::channel::{Kind, MAX_CONTENT, Sender};
use crate::environment::{CLOCK, LAB};
use crate::request::{self, Request};

const RESULTS: &str = "/out";
/// The interval between two beats.
pub(crate) const BEAT: Duration = Duration::from_secs(5);

/// The lab's init failed.
#[derive(Debug, Error)]
pub enum InitError {
    /// The channel to the caller cannot be opened or written.
    #[error(
        "cannot write to the lab's channel {path}; `firn lab init` works only in the lab, which starts it"
    )]
    Channel {
        /// The device.
        path: String,
        /// The cause.
        source: io::Error,
    },
}

/// Serves one request: `payload` is the device with the request and its files, `channel` the port
/// to the caller.
///
/// # Errors
///
/// The channel cannot be opened or written. Other errors are sent through the channel.
pub fn init(payload: &Path, channel: &Path) -> Result<(), InitError> {
    let failed = |source| InitError::Channel { path: channel.display().to_string(), source };
    let port = OpenOptions::new().write(true).open(channel).map_err(failed)?;
    let sender = Arc::new(Sender::new(port));
    match serve(payload, &sender) {
        Ok(code) => sender.send(Kind::Exit, &[code]).map_err(failed)?,
        Err(error) => {
            sender
                .send(Kind::Failure, firn_base::error_chain(&error).as_bytes())
                .map_err(failed)?;
        }
    }
    // Closing the port could lose the last frame. The caller stops L1 when that frame has arrived.
    std::thread::sleep(Duration::from_secs(60));
    Ok(())
}

fn serve(payload: &Path, sender: &Arc<Sender<File>>) -> io::Result<u8> {
    let request = request::unpack(File::open(payload)?, Path::new("/"))?;
    sender.send(Kind::Ready, &[])?;
    // A clock that counts instructions jumps while nothing else runs, so each jump would be a beat.
    if request.environment.iter().all(|(name, _)| name != CLOCK) {
        beat(Arc::clone(sender));
    }
    let code = run(&request, sender)?;
    if request.results {
        request::pack_results(Path::new(RESULTS), sender.writer(Kind::Results))?;
    }
    Ok(code)
}

/// Sends a beat at each interval, for ever. Under emulation a timer of L1's kernel can be lost, and
/// the kernel then stands still without a message.
fn beat(sender: Arc<Sender<File>>) {
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(BEAT);
            if sender.send(Kind::Beat, &[]).is_err() {
                return;
            }
        }
    });
}

fn run(request: &Request, sender: &Sender<File>) -> io::Result<u8> {
    let Some((program, arguments)) = request.command.split_first() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the request names no command"));
    };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs([
            ("PATH", "/bin:/in"),
            ("HOME", "/root"),
            ("TMPDIR", "/scratch"),
            ("FIRN_CACHE", "/cache"),
            (LAB, "1"),
        ])
        .envs(request.environment.iter().map(|(name, value)| (name, value)))
        .current_dir("/scratch")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        // The exit codes of a shell that cannot start a command.
        Err(error) => {
            sender.send(
                Kind::Stderr,
                format!("firn lab: {program} cannot be run in the lab: {error}\n").as_bytes(),
            )?;
            return Ok(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 });
        }
    };
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        let relays = [
            scope.spawn(|| relay(stdout, Kind::Stdout, sender)),
            scope.spawn(|| relay(stderr, Kind::Stderr, sender)),
        ];
        let status = child.wait()?;
        // Processes that outlive the command keep its pipes open. For kill(2) process group 1 is
        // all processes except the caller and init.
        match kill_process_group(Pid::INIT, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
        for relay in relays {
            relay
                .join()
                .map_err(|_| io::Error::other("a relay of the command's output panicked"))??;
        }
        Ok(exit_code(status))
    })
}

fn relay(pipe: Option<impl Read>, kind: Kind, sender: &Sender<File>) -> io::Result<()> {
    let Some(mut pipe) = pipe else { return Ok(()) };
    let mut buffer = vec![0; MAX_CONTENT];
    loop {
        match pipe.read(&mut buffer)? {
            0 => return Ok(()),
            length => sender.send(kind, &buffer[..length])?,
        }
    }
}

/// The code that a shell reports: the command's exit code, or 128 plus the number of the signal
/// that ended it.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| Some(128 + status.signal()?));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[cfg(test)]
#[path = "init_tests.rs"]
mod tests;
