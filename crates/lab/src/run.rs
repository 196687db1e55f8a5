//! Runs one command in the lab.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::cache::cache_dir;
use crate::channel::{Kind, ReceiveError, receive};
use crate::environment::{CLOCK, INSTRUCTIONS};
use crate::init::BEAT;
use crate::machine::{Lab, Machine};
use crate::request::{self, Request};
use crate::{LabError, RunConfig};

/// Limit for the boot of the lab's machine. A boot takes 3 s on an idle computer.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// How many machines are started until one boots. A timer that emulation loses can stop a boot.
const BOOTS: u32 = 2;
/// How long no beat may arrive before it counts as a silence.
const SILENCE: Duration = BEAT.saturating_mul(6);
/// How many silences in succession make a machine that stands still. One alone may come from a
/// pause of this process.
const SILENCES: u32 = 10;

/// An event that the main thread waits for.
enum Event {
    /// L1 has booted.
    Ready,
    /// The timers of L1's kernel work.
    Beat,
    /// The channel has ended.
    Ended(Result<Ending, RelayError>),
    /// This process received a signal that asks it to stop.
    Signal(i32),
}

/// The command in the lab has exited.
struct Ending {
    code: u8,
    results: Option<File>,
    captured: Option<Captured>,
}

/// The output of a command.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// The bytes of its standard output.
    pub stdout: Vec<u8>,
    /// The bytes of its standard error.
    pub stderr: Vec<u8>,
}

/// The relay of the channel stopped with an error.
enum RelayError {
    Receive(ReceiveError),
    Refused(String),
    Output(io::Error),
    Results(io::Error),
}

/// The result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// The command's exit code; 128 + n if signal n ended it.
    pub exit_code: u8,
    /// The command's output, with [`RunConfig::capture`].
    pub captured: Option<Captured>,
}

/// Runs a command in the lab. SIGHUP, SIGINT and SIGTERM to this process stop the lab.
///
/// # Errors
///
/// The lab itself failed, the command exceeded its limit, or a signal stopped the run; see
/// [`LabError::exit_code`].
pub fn run(config: &RunConfig) -> Result<Outcome, LabError> {
    let started = Instant::now();
    let lab = Lab::open(cache_dir().ok_or(LabError::NoCache)?)?;
    let prepare = |what| move |source| LabError::Prepare { what, source };
    let (events, received) = mpsc::channel();
    forward_signals(events.clone()).map_err(prepare("its signal handlers"))?;

    let mut environment = config.environment.clone();
    if config.icount {
        environment.push((CLOCK.to_owned(), INSTRUCTIONS.to_owned()));
    }
    let request =
        Request { command: config.command.clone(), environment, results: config.out.is_some() };
    if let Some(folder) = &config.out {
        // An error here is reported before the command runs.
        fs::create_dir_all(folder)
            .map_err(|source| LabError::Results { path: folder.clone(), source })?;
    }
    let mut payload = lab.temporary().map_err(prepare("the inputs' disk"))?;
    request::pack(&mut payload, &request, &config.inputs)?;
    let mut tries = 0;
    let (mut machine, stop) = loop {
        tries += 1;
        let results = match config.out {
            Some(_) => Some(lab.temporary().map_err(prepare("the results' file"))?),
            None => None,
        };
        let (machine, channel) = Machine::start(&lab, &payload, config)?;
        let writes = Arc::new(AtomicBool::new(false));
        let limits = Limits {
            boot: Instant::now() + BOOT_LIMIT,
            end: config.timeout.map(|limit| started + limit),
            silence: (!config.icount).then_some(SILENCE),
            writes: Arc::clone(&writes),
        };
        // The relay has its own thread, so that a blocked standard output does not delay the
        // timeout.
        let captured = config.capture.then(Captured::default);
        let events = events.clone();
        std::thread::spawn(move || {
            let ending = relay(channel, results, captured, &events, &writes);
            // The main thread exits only with the process.
            let _ = events.send(Event::Ended(ending));
        });
        match wait(&received, &limits) {
            Stop::NoBoot if tries < BOOTS => drop(machine),
            stop => break (machine, stop),
        }
        if let Some(signal) = relay_ends(&received) {
            return Err(LabError::Interrupted { signal });
        }
    };
    let ending = match stop {
        Stop::Ended(Ok(ending)) => ending,
        Stop::Ended(Err(RelayError::Receive(ReceiveError::Ended))) => {
            let status = machine.exit_status().map_err(LabError::Start)?;
            return Err(LabError::Died { status, console: machine.console_tail() });
        }
        Stop::Ended(Err(RelayError::Receive(source))) => return Err(LabError::Channel(source)),
        Stop::Ended(Err(RelayError::Refused(reason))) => return Err(LabError::Refused { reason }),
        Stop::Ended(Err(RelayError::Output(source))) => return Err(LabError::Output(source)),
        Stop::Ended(Err(RelayError::Results(source))) => {
            return Err(prepare("the results' file")(source));
        }
        Stop::Signal(signal) => return Err(LabError::Interrupted { signal }),
        Stop::TimedOut => {
            return Err(LabError::TimedOut {
                seconds: config.timeout.unwrap_or_default().as_secs(),
                console: machine.console_tail(),
            });
        }
        Stop::NoBoot => {
            return Err(LabError::NoBoot {
                tries,
                seconds: BOOT_LIMIT.as_secs(),
                console: machine.console_tail(),
            });
        }
        Stop::Still => {
            return Err(LabError::Still {
                seconds: SILENCE.saturating_mul(SILENCES).as_secs(),
                console: machine.console_tail(),
            });
        }
    };
    drop(machine);

    if let (Some(mut archive), Some(folder)) = (ending.results, &config.out) {
        request::unpack_results(&mut archive, folder)
            .map_err(|source| LabError::Results { path: folder.clone(), source })?;
    }
    Ok(Outcome { exit_code: ending.code, captured: ending.captured })
}

/// The end of the wait for the command.
enum Stop {
    Ended(Result<Ending, RelayError>),
    Signal(i32),
    TimedOut,
    NoBoot,
    Still,
}

/// Limits of the wait for a machine.
struct Limits {
    /// L1 has to have booted by then.
    boot: Instant,
    /// The command has to have exited by then.
    end: Option<Instant>,
    /// A pause between two beats that is a silence, if beats are sent.
    silence: Option<Duration>,
    /// Whether the relay is writing, perhaps to a reader that waits, and so receives no beat.
    writes: Arc<AtomicBool>,
}

fn wait(received: &Receiver<Event>, limits: &Limits) -> Stop {
    let mut up = false;
    let mut silences = 0;
    loop {
        let now = Instant::now();
        let machine = match limits.silence {
            _ if !up => Some((limits.boot, Stop::NoBoot)),
            silence => silence.map(|silence| (now + silence, Stop::Still)),
        };
        let end = limits.end.map(|end| (end, Stop::TimedOut));
        let next = machine.into_iter().chain(end).min_by_key(|(at, _)| *at);
        let event = match next {
            None => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some((at, _)) => received.recv_timeout(at.saturating_duration_since(now)),
        };
        match (event, next) {
            (Ok(Event::Ready), _) => up = true,
            (Ok(Event::Beat), _) => silences = 0,
            (Ok(Event::Ended(ending)), _) => return Stop::Ended(ending),
            (Ok(Event::Signal(signal)), _) => return Stop::Signal(signal),
            (Err(RecvTimeoutError::Timeout), Some((_, Stop::Still)))
                if limits.writes.load(Ordering::Relaxed) =>
            {
                silences = 0;
            }
            (Err(RecvTimeoutError::Timeout), Some((_, Stop::Still))) if silences + 1 < SILENCES => {
                silences += 1;
            }
            (Err(RecvTimeoutError::Timeout), Some((_, stop))) => return stop,
            // The relay panicked.
            (Err(_), _) => return Stop::Ended(Err(RelayError::Receive(ReceiveError::Ended))),
        }
    }
}

/// Waits until the relay of a killed machine has ended. Returns the number of a signal that asked
/// this process to stop.
fn relay_ends(received: &Receiver<Event>) -> Option<i32> {
    received.iter().find_map(|event| match event {
        Event::Ended(_) => Some(None),
        Event::Signal(signal) => Some(Some(signal)),
        Event::Ready | Event::Beat => None,
    })?
}

/// Sends SIGHUP, SIGINT and SIGTERM to the main thread as events.
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

/// Relays the channel's frames up to the last one.
fn relay(
    mut channel: impl Read,
    mut results: Option<File>,
    mut captured: Option<Captured>,
    events: &Sender<Event>,
    writes: &AtomicBool,
) -> Result<Ending, RelayError> {
    // `Stdout` buffers the part after the last line feed.
    let unbuffered = |stream: BorrowedFd<'_>| {
        stream.try_clone_to_owned().map(File::from).map_err(RelayError::Output)
    };
    let mut stdout = unbuffered(io::stdout().as_fd())?;
    let mut stderr = unbuffered(io::stderr().as_fd())?;
    let mut content = Vec::new();
    loop {
        writes.store(false, Ordering::Relaxed);
        let kind = receive(&mut channel, &mut content).map_err(RelayError::Receive)?;
        writes.store(true, Ordering::Relaxed);
        match (kind, &mut captured) {
            // Without a main thread the process has exited.
            (Kind::Ready, _) => drop(events.send(Event::Ready)),
            (Kind::Beat, _) => drop(events.send(Event::Beat)),
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
