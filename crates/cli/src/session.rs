//! A microVM of this process: claimed, served, and ended without leaving anything behind.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thiserror::Error;

use firn_run::{ClaimError, Instances, OwnedInstance};
use firn_vmm::{
    BindVsockError, Console, ControlServer, ControlServerError, End, Handle, HostConfig, Microvm,
    RunError, VcpuFailure, VsockListener,
};
use uuid::Uuid;

use crate::output;

/// How long a process may take to follow the end of its input.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Lines of the guest's console that an error report shows.
/// A panic of Linux, from its reason to its last word, has about 50.
const CONSOLE_LINES: usize = 60;

/// What is to happen once the microVM is ready and the leading thread has done its work.
pub(crate) enum After {
    /// Serve until somebody ends the microVM.
    Serve,
    /// End the microVM.
    Stop,
}

/// Why a session did not go well.
#[derive(Debug, Error)]
pub(crate) enum SessionError {
    /// The console's file cannot be made.
    #[error("making the console's file {path}")]
    ConsoleFile { path: std::path::PathBuf, source: std::io::Error },
    /// The name is taken, or is none.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The vsock's socket cannot be made.
    #[error(transparent)]
    Vsock(#[from] BindVsockError),
    /// The directory for temporary files cannot be opened.
    #[error("cannot open the directory for temporary files, {dir}; set TMPDIR to another one")]
    Scratch { dir: std::path::PathBuf, source: std::io::Error },
    /// Signals cannot be caught.
    #[error("preparing to catch signals")]
    Signals(#[source] std::io::Error),
    /// The control socket could not be made.
    #[error(transparent)]
    Control(#[from] ControlServerError),
    /// A thread could not be started.
    #[error("starting a thread")]
    Thread(#[source] std::io::Error),
    /// The monitor broke.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The guest reset itself.
    #[error("the guest reset itself, which Linux does when it panics{0}")]
    Reset(ConsoleTail),
    /// The guest triple-faulted.
    #[error("the guest crashed with a triple fault{0}")]
    TripleFault(ConsoleTail),
    /// A vCPU could not run on.
    #[error("the microVM was ended because its guest could not run on")]
    Failure(#[source] VcpuFailure),
    /// The guest powered itself off in the middle of what was asked.
    #[error("the guest powered itself off before it was ready{0}")]
    Shutdown(ConsoleTail),
    /// A signal ended it in the middle of what was asked.
    #[error("ended by signal {0}")]
    Signal(i32),
}

/// The end of the guest's console output, for an error's text.
#[derive(Debug)]
pub(crate) struct ConsoleTail(String);

impl ConsoleTail {
    pub(crate) fn of(console: &Console) -> Self {
        Self(console.tail(CONSOLE_LINES))
    }
}

impl std::fmt::Display for ConsoleTail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            write!(f, "; its console is empty")
        } else {
            write!(f, "; the end of its console:\n  {}", self.0.replace('\n', "\n  "))
        }
    }
}

/// What ends this process, if anything did: known before there is a microVM to end.
pub(crate) struct Interruption {
    signal: Arc<AtomicI32>,
    handle: Arc<std::sync::Mutex<Option<Handle>>>,
    signals: signal_hook::iterator::Handle,
}

impl Interruption {
    /// From here on SIGINT, SIGTERM and SIGHUP end the session, not the process.
    pub(crate) fn catch() -> Result<Self, SessionError> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(SessionError::Signals)?;
        let interruption = Self {
            signal: Arc::new(AtomicI32::new(0)),
            handle: Arc::default(),
            signals: signals.handle(),
        };
        let (signal, handle) = (interruption.signal.clone(), interruption.handle.clone());
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                for caught in signals.forever() {
                    signal.store(caught, Ordering::SeqCst);
                    let handle =
                        handle.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
                    if let Some(handle) = handle {
                        // It may have ended by itself just now.
                        let _ = handle.call(Microvm::stop);
                    }
                }
            })
            .map_err(SessionError::Thread)?;
        Ok(interruption)
    }

    fn signal(&self) -> Option<i32> {
        Some(self.signal.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
    }
}

/// What a microVM with this instance's name uses of the host.
pub(crate) fn host(
    instance: &OwnedInstance,
    console: Console,
    generation: Uuid,
) -> Result<HostConfig, SessionError> {
    let dir = std::env::temp_dir();
    let scratch = std::fs::File::open(&dir);
    Ok(HostConfig {
        vsock: Some(VsockListener::bind(&instance.vsock_socket())?),
        scratch: Some(scratch.map_err(|source| SessionError::Scratch { dir, source })?.into()),
        console,
        generation: Some(generation),
        windows: Vec::new(),
    })
}

/// Ends this process when its standard input ends, as a signal would: whoever started it holds the other end, and
/// has gone then, however it went. A process that does not follow the signal is ended all the same.
pub(crate) fn end_with_input() -> Result<(), SessionError> {
    let wait = || {
        // An input that cannot be read has ended, too.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = kill_process(getpid(), Signal::TERM);
        std::thread::sleep(END_LIMIT);
        std::process::exit(1);
    };
    std::thread::Builder::new().name("input".into()).spawn(wait).map_err(SessionError::Thread)?;
    Ok(())
}

impl Drop for Interruption {
    fn drop(&mut self) {
        self.signals.close();
    }
}

/// Ends the microVM when the leading thread ends without wanting it to go on, by a panic too.
struct StopOnDrop(Option<Handle>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        if let Some(handle) = self.0.take() {
            // It may have ended by itself just now.
            let _ = handle.call(Microvm::stop);
        }
    }
}

/// Claims the name of a microVM, or one that nobody has.
pub(crate) fn claim(name: Option<&str>) -> Result<OwnedInstance, SessionError> {
    let unnamed = format!("vm-{}", std::process::id());
    Ok(Instances::of_user().claim(name.unwrap_or(&unnamed))?)
}

/// A console that is kept for error reports, and copied to a file if one is named.
pub(crate) fn console(copy: Option<&Path>) -> Result<Console, SessionError> {
    let file = copy.map(std::fs::File::create).transpose().map_err(|source| {
        SessionError::ConsoleFile { path: copy.unwrap_or(Path::new("")).to_owned(), source }
    })?;
    Ok(Console::new(file))
}

/// Runs a microVM in this thread and `lead` in another, until both are done.
///
/// `lead` gets a handle and a question: whether the microVM is still there. Its error ends the
/// microVM; where the microVM ended first, that is the cause that is told.
pub(crate) fn run<T: Send, E: Send + From<SessionError>>(
    microvm: Microvm,
    instance: &OwnedInstance,
    interruption: &Interruption,
    lead: impl FnOnce(&Handle, &AtomicBool) -> Result<(T, After), E> + Send,
) -> Result<T, E> {
    run_until(microvm, instance, interruption, lead, |_| ())
}

/// The same, with a last look at the microVM when it has ended.
pub(crate) fn run_until<T: Send, E: Send + From<SessionError>>(
    mut microvm: Microvm,
    instance: &OwnedInstance,
    interruption: &Interruption,
    lead: impl FnOnce(&Handle, &AtomicBool) -> Result<(T, After), E> + Send,
    last: impl FnOnce(&mut Microvm),
) -> Result<T, E> {
    let handle = microvm.handle();
    *interruption.handle.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
        Some(handle.clone());
    let _control = ControlServer::bind(&instance.control_socket(), handle.clone())
        .map_err(SessionError::from)?;
    let console = microvm.console().clone();
    let alive = AtomicBool::new(true);
    if interruption.signal().is_some() {
        microvm.stop();
    }

    let (led, end) = std::thread::scope(|scope| {
        let lead_handle = handle.clone();
        let lead_alive = &alive;
        let leader = scope.spawn(move || {
            let mut guard = StopOnDrop(Some(lead_handle.clone()));
            let result = lead(&lead_handle, lead_alive);
            if matches!(result, Ok((_, After::Serve))) {
                guard.0 = None;
            }
            result
        });
        let end = microvm.run();
        alive.store(false, Ordering::SeqCst);
        for error in microvm.device_errors() {
            output::note(&format!("firn: {error}"));
        }
        last(&mut microvm);
        // Its sockets close, so that the leader does not wait for an answer that cannot come.
        drop(microvm);
        (leader.join(), end)
    });
    let led = led.unwrap_or_else(|panic| std::panic::resume_unwind(panic));

    let tail = || ConsoleTail::of(&console);
    let cause = match end.map_err(SessionError::from)? {
        End::Stopped | End::Shutdown if led.is_ok() => None,
        End::Stopped => interruption.signal().map(SessionError::Signal),
        End::Shutdown => Some(SessionError::Shutdown(tail())),
        End::Reset => Some(SessionError::Reset(tail())),
        End::TripleFault => Some(SessionError::TripleFault(tail())),
        End::Failure(failure) => Some(SessionError::Failure(failure)),
    };
    match cause {
        Some(cause) => Err(cause.into()),
        None => led.map(|(value, _)| value),
    }
}
