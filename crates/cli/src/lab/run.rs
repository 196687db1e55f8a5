//! Runs one command in the lab.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::cache::cache_dir;
use super::channel::{Kind, ReceiveError, receive};
use super::machine::{Lab, Machine};
use super::request::{self, Request};
use super::{CLOCK, INSTRUCTIONS, LabError, RunArgs};

/// How long the lab's machine may take to come up. It takes 3 s on an idle computer.
const BOOT_LIMIT: Duration = Duration::from_secs(180);

/// What the main thread waits for.
enum Event {
    /// L1 is up.
    Ready,
    /// The channel has nothing more to say.
    Ended(Result<Ending, RelayError>),
    /// This process got a signal that asks it to end.
    Signal(i32),
}

/// How the command in the lab ended.
struct Ending {
    code: u8,
    results: Option<File>,
    captured: Option<Captured>,
}

/// The command's output, where it is kept instead of passed on.
#[derive(Default)]
struct Captured {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// The relay of what comes through the channel stopped.
enum RelayError {
    Receive(ReceiveError),
    Refused(String),
    Output(io::Error),
    Results(io::Error),
}

/// What `firn lab run --json` prints.
#[derive(Serialize)]
struct Report<'a> {
    exit_code: u8,
    stdout: Cow<'a, str>,
    stderr: Cow<'a, str>,
}

/// Runs the command in the lab and returns its exit code.
pub(crate) fn run(arguments: &RunArgs) -> Result<u8, LabError> {
    let started = Instant::now();
    let lab = Lab::open(cache_dir().ok_or(LabError::NoCache)?)?;
    let prepare = |what| move |source| LabError::Prepare { what, source };
    let (events, received) = mpsc::channel();
    forward_signals(events.clone()).map_err(prepare("its signal handlers"))?;

    let mut environment = arguments.environment.clone();
    if arguments.icount {
        environment.push((CLOCK.to_owned(), INSTRUCTIONS.to_owned()));
    }
    let request = Request {
        command: arguments.command.clone(),
        environment,
        results: arguments.out.is_some(),
    };
    if let Some(folder) = &arguments.out {
        // Now, and not when the work is done.
        fs::create_dir_all(folder)
            .map_err(|source| LabError::Results { path: folder.clone(), source })?;
    }
    let mut payload = lab.temporary().map_err(prepare("the inputs' disk"))?;
    request::pack(&mut payload, &request, &arguments.inputs)?;
    let results = match arguments.out {
        Some(_) => Some(lab.temporary().map_err(prepare("the results' file"))?),
        None => None,
    };
    let (mut machine, channel) = Machine::start(&lab, &payload, arguments)?;

    // The relay is a thread of its own, so that a caller who does not read our output cannot keep us from ending in time.
    let captured = arguments.json.then(Captured::default);
    std::thread::spawn(move || {
        let ending = relay(channel, results, captured, &events);
        // The main thread is gone only when the process ends.
        let _ = events.send(Event::Ended(ending));
    });
    let limit = arguments.timeout.map(Duration::from_secs);
    let ending = match wait(&received, started, limit) {
        Stop::Ended(Ok(ending)) => ending,
        Stop::Ended(Err(RelayError::Receive(ReceiveError::Ended))) => {
            let status = machine.settle().map_err(LabError::Start)?;
            return Err(LabError::Died { status, console: machine.last_words() });
        }
        Stop::Ended(Err(RelayError::Receive(source))) => return Err(LabError::Channel(source)),
        Stop::Ended(Err(RelayError::Refused(reason))) => return Err(LabError::Refused { reason }),
        Stop::Ended(Err(RelayError::Output(source))) => return Err(LabError::Output(source)),
        Stop::Ended(Err(RelayError::Results(source))) => {
            return Err(prepare("the results' file")(source));
        }
        Stop::Signal(signal) => return Err(LabError::Interrupted { signal }),
        Stop::TimedOut => {
            return Err(LabError::TimedOut { seconds: limit.unwrap_or_default().as_secs() });
        }
        Stop::NoBoot => {
            return Err(LabError::NoBoot {
                seconds: BOOT_LIMIT.as_secs(),
                console: machine.last_words(),
            });
        }
    };
    drop(machine);

    if let (Some(mut archive), Some(folder)) = (ending.results, &arguments.out) {
        request::unpack_results(&mut archive, folder)
            .map_err(|source| LabError::Results { path: folder.clone(), source })?;
    }
    if let Some(captured) = ending.captured {
        let report = Report {
            exit_code: ending.code,
            stdout: String::from_utf8_lossy(&captured.stdout),
            stderr: String::from_utf8_lossy(&captured.stderr),
        };
        let mut stdout = io::stdout().lock();
        serde_json::to_writer(&mut stdout, &report)
            .map_err(|error| LabError::Output(error.into()))?;
        writeln!(stdout).map_err(LabError::Output)?;
    }
    Ok(ending.code)
}

/// Why the wait for the command is over.
enum Stop {
    Ended(Result<Ending, RelayError>),
    Signal(i32),
    TimedOut,
    NoBoot,
}

fn wait(received: &Receiver<Event>, started: Instant, limit: Option<Duration>) -> Stop {
    let mut up = false;
    loop {
        let boot = if up { None } else { Some((BOOT_LIMIT, Stop::NoBoot)) };
        let next = boot
            .into_iter()
            .chain(limit.map(|limit| (limit, Stop::TimedOut)))
            .min_by_key(|(limit, _)| *limit);
        let event = match next {
            None => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some((limit, _)) => received.recv_timeout(limit.saturating_sub(started.elapsed())),
        };
        match (event, next) {
            (Ok(Event::Ready), _) => up = true,
            (Ok(Event::Ended(ending)), _) => return Stop::Ended(ending),
            (Ok(Event::Signal(signal)), _) => return Stop::Signal(signal),
            (Err(RecvTimeoutError::Timeout), Some((_, stop))) => return stop,
            // Only a relay that panicked leaves without a word.
            (Err(_), _) => return Stop::Ended(Err(RelayError::Receive(ReceiveError::Ended))),
        }
    }
}

/// Sends the signals that ask this process to end to the main thread, which ends the lab first.
fn forward_signals(events: Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// Passes on what comes through the channel, until its last frame.
fn relay(
    mut channel: impl Read,
    mut results: Option<File>,
    mut captured: Option<Captured>,
    events: &Sender<Event>,
) -> Result<Ending, RelayError> {
    // Not `Stdout`, which holds back what does not end in a line feed.
    let unbuffered = |stream: BorrowedFd<'_>| {
        stream.try_clone_to_owned().map(File::from).map_err(RelayError::Output)
    };
    let mut stdout = unbuffered(io::stdout().as_fd())?;
    let mut stderr = unbuffered(io::stderr().as_fd())?;
    let mut content = Vec::new();
    loop {
        match (receive(&mut channel, &mut content).map_err(RelayError::Receive)?, &mut captured) {
            // A main thread that is gone has ended the process.
            (Kind::Ready, _) => drop(events.send(Event::Ready)),
            (Kind::Stdout, None) => stdout.write_all(&content).map_err(RelayError::Output)?,
            (Kind::Stderr, None) => stderr.write_all(&content).map_err(RelayError::Output)?,
            (Kind::Stdout, Some(captured)) => captured.stdout.extend(&content),
            (Kind::Stderr, Some(captured)) => captured.stderr.extend(&content),
            (Kind::Results, _) => {
                if let Some(results) = &mut results {
                    results.write_all(&content).map_err(RelayError::Results)?;
                }
            }
            (Kind::Exit, _) => {
                return Ok(Ending {
                    code: content.first().copied().unwrap_or(u8::MAX),
                    results,
                    captured,
                });
            }
            (Kind::Failure, _) => {
                return Err(RelayError::Refused(String::from_utf8_lossy(&content).into_owned()));
            }
        }
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
