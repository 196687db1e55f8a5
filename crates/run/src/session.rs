//! A microVM served in this process, and ended without leaving anything behind.

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use firn_base::ErrorChain;
use firn_vmm::{End, Handle, Microvm, serve_control};
use parking_lot::Mutex;
use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::console_tail::ConsoleTail;
use crate::error::StartError;

/// How long a process may take to end after its owner has.
const END_LIMIT: Duration = Duration::from_secs(10);

/// What happens once the microVM is ready and the leading thread has done its work.
pub(crate) enum After {
    /// Serve until something ends the microVM.
    Serve,
    /// End the microVM.
    Stop,
}

/// Signals that end the microVM of this process. They are caught from before the microVM exists.
pub struct Interruption {
    signal: Arc<AtomicI32>,
    handle: Arc<Mutex<Option<Handle>>>,
    signals: signal_hook::iterator::Handle,
}

impl Interruption {
    /// From here on SIGINT, SIGTERM and SIGHUP end the microVM instead of the process.
    ///
    /// # Errors
    /// [`StartError::Session`]: signals cannot be caught.
    pub fn catch() -> Result<Self, StartError> {
        let failed = |error| StartError::session("catch signals", error);
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(failed)?;
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
                    let handle = handle.lock().clone();
                    if let Some(handle) = handle {
                        // The microVM may have ended just now.
                        let _ = handle.call(Microvm::stop);
                    }
                }
            })
            .map_err(failed)?;
        Ok(interruption)
    }

    /// The signal that came, or 0: for a process that waits before its microVM runs.
    pub(crate) fn signal_flag(&self) -> Arc<AtomicI32> {
        self.signal.clone()
    }

    /// The microVM of this process, once it runs.
    pub(crate) fn handle(&self) -> Arc<Mutex<Option<Handle>>> {
        self.handle.clone()
    }

    fn signal(&self) -> Option<i32> {
        Some(self.signal.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
    }
}

impl Drop for Interruption {
    fn drop(&mut self) {
        self.signals.close();
    }
}

/// Ends this process with SIGTERM once `owner` returns: the other end of what it reads was closed,
/// so the process that started this one has ended. A process that does not follow the signal is
/// ended all the same.
///
/// # Errors
/// [`StartError::Session`]: no thread can be started.
pub fn end_with(owner: impl FnOnce() + Send + 'static) -> Result<(), StartError> {
    let wait = || {
        owner();
        let _ = kill_process(getpid(), Signal::TERM);
        std::thread::sleep(END_LIMIT);
        std::process::exit(1);
    };
    let thread = std::thread::Builder::new().name("owner".into()).spawn(wait);
    thread.map(drop).map_err(|error| StartError::session("start a thread", error))
}

/// Ends the microVM when the leading thread ends without letting it continue, also by a panic.
struct StopOnDrop(Option<Handle>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        if let Some(handle) = self.0.take() {
            // The microVM may have ended just now.
            let _ = handle.call(Microvm::stop);
        }
    }
}

/// Serves a microVM in this thread and runs `lead` in another, until both are done; then calls
/// `last` on the microVM.
///
/// `lead` gets a handle, and whether the microVM still runs. Its error ends the microVM. Where the
/// microVM ended first, the error is the cause of that. `note` gets the errors of devices that
/// stopped serving the guest.
pub(crate) fn run<T: Send, E: Send + From<StartError>>(
    mut microvm: Microvm,
    control: &UnixListener,
    interruption: &Interruption,
    lead: impl FnOnce(&Handle, &AtomicBool) -> Result<(T, After), E> + Send,
    note: impl Fn(&str),
    last: impl FnOnce(&mut Microvm),
) -> Result<T, E> {
    let handle = microvm.handle();
    *interruption.handle.lock() = Some(handle.clone());
    let control = control.try_clone().map_err(|error| StartError::session("listen", error))?;
    serve_control(control, handle.clone()).map_err(StartError::from)?;
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
            note(&error);
        }
        last(&mut microvm);
        // Its sockets close, so that the leader does not wait for an answer that cannot come.
        drop(microvm);
        (leader.join(), end)
    });
    let led = led.unwrap_or_else(|panic| std::panic::resume_unwind(panic));

    let tail = || ConsoleTail::of(&console);
    let cause = match end.map_err(StartError::from)? {
        End::Stopped | End::Shutdown if led.is_ok() => None,
        End::Stopped => interruption.signal().map(StartError::Signal),
        End::Shutdown => Some(StartError::Shutdown(tail())),
        End::Reset => Some(StartError::Reset(tail())),
        End::TripleFault => Some(StartError::TripleFault(tail())),
        End::Failure(failure) => Some(StartError::Failure(ErrorChain::of(&failure))),
    };
    match cause {
        Some(cause) => Err(cause.into()),
        None => led.map(|(value, _)| value),
    }
}
