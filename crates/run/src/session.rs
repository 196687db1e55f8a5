//! A microVM served in this process, and ended without leaving anything behind.

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use firn_base::ErrorChain;
use firn_vmm::{End, Handle, Microvm, VcpuThreadError, serve_control};
use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::console_tail::ConsoleTail;
use crate::error::StartError;

/// What happens once the microVM is ready and the leading thread has done its work.
pub(crate) enum After {
    /// Serve until something ends the microVM.
    Serve,
    /// End the microVM.
    Stop,
}

/// Signals that end the microVM of this process. They are caught from before the microVM exists.
pub struct Interruption {
    ending: Arc<Ending>,
    signals: signal_hook::iterator::Handle,
}

/// How the microVM of this process is ended from outside.
pub(crate) struct Ending {
    signal: AtomicI32,
    handle: Mutex<Option<Handle>>,
    otherwise: Mutex<Option<Otherwise>>,
}

/// What a signal does while this process runs no microVM.
type Otherwise = Box<dyn Fn(i32) + Send>;

impl Interruption {
    /// From here on SIGINT, SIGTERM and SIGHUP end the microVM instead of the process.
    ///
    /// # Errors
    /// [`StartError::Session`]: signals cannot be caught.
    pub fn catch() -> Result<Self, StartError> {
        Self::catch_with(None)
    }

    /// The same, and calls `otherwise` for each signal while this process runs no microVM.
    pub(crate) fn catch_or(otherwise: impl Fn(i32) + Send + 'static) -> Result<Self, StartError> {
        Self::catch_with(Some(Box::new(otherwise)))
    }

    fn catch_with(otherwise: Option<Otherwise>) -> Result<Self, StartError> {
        let failed = |error| StartError::session("catch signals", error);
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(failed)?;
        let ending = Arc::new(Ending {
            signal: AtomicI32::new(0),
            handle: Mutex::default(),
            otherwise: Mutex::new(otherwise),
        });
        let interruption = Self { ending: ending.clone(), signals: signals.handle() };
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || signals.forever().for_each(|signal| ending.end(signal)))
            .map_err(failed)?;
        Ok(interruption)
    }

    /// The means to end the microVM without a signal.
    pub(crate) fn ending(&self) -> Arc<Ending> {
        self.ending.clone()
    }

    /// From here on a signal without a microVM is only noted.
    #[cfg(feature = "player-agent")]
    pub(crate) fn note_only(&self) {
        *self.ending.otherwise.lock() = None;
    }

    /// The signal that came, if one did.
    pub(crate) fn signal(&self) -> Option<i32> {
        Some(self.ending.signal.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
    }
}

impl Drop for Interruption {
    fn drop(&mut self) {
        self.signals.close();
    }
}

impl Ending {
    /// Ends the microVM as `signal` does.
    pub(crate) fn end(&self, signal: i32) {
        self.signal.store(signal, Ordering::SeqCst);
        let handle = self.handle.lock().clone();
        if let Some(handle) = handle {
            // The microVM may have ended just now.
            let _ = handle.call(Microvm::stop);
        } else if let Some(otherwise) = &*self.otherwise.lock() {
            otherwise(signal);
        }
    }

    /// Changes the microVM, if it runs, and ends one that cannot be changed. Does not wait for
    /// that.
    pub(crate) fn post(&self, change: fn(&mut Microvm) -> Result<(), VcpuThreadError>) {
        let Some(handle) = self.handle.lock().clone() else { return };
        // The microVM may have ended just now.
        let _ = handle.post(move |microvm| {
            if change(microvm).is_err() {
                microvm.stop();
            }
        });
    }
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
) -> Result<T, E> {
    let handle = microvm.handle();
    *interruption.ending.handle.lock() = Some(handle.clone());
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
