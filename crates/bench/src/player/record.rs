//! A replay that is recorded.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use firn_memory::page_cache::preload;
use firn_memory::recorders::{ProfileRecordError, ProfileRecorder};
use firn_snapshot::{Profile, Snapshot};
use firn_vmm::{FrozenMachine, Microvm};
use thiserror::Error;

use super::freeze::host;
use super::registers::{Meters, window};
use super::replay::{INPUT_ARGUMENT, ReplayError, check, input_of, run};

/// Why a replay was not recorded.
#[derive(Debug, Error)]
pub enum RecordReplayError {
    /// Nothing was replayed, or the player found wrong memory.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The recorder failed.
    #[error(transparent)]
    Recorder(#[from] ProfileRecordError),
}

/// Thaws the player of a snapshot by the recorder's plan, lets it replay a trace (the first, where `input` names none) up to
/// its last touch under the recorder, and then check all its memory. The recorder's parts are put into `profile`, and
/// the trace's name is put among its inputs. Returns where in the kernel the recorder watched, if that depends on the kernel.
///
/// # Errors
/// See [`RecordReplayError`]; `profile` is as it was. A page that is not what was frozen ends this process where the recorder serves memory.
pub fn record(
    snapshot: &Snapshot,
    input: Option<&str>,
    mut recorder: Box<dyn ProfileRecorder>,
    kvm: &Path,
    profile: &mut Profile,
) -> Result<Option<String>, RecordReplayError> {
    let (number, trace) = input_of(snapshot, input)?;
    let mut frozen = FrozenMachine::open(snapshot, kvm).map_err(ReplayError::from)?;
    frozen.set_argument(INPUT_ARGUMENT, number);
    if recorder.faults_in_vcpu_threads() {
        frozen.fault_in_vcpu_threads();
    }
    let memory = recorder.memory(snapshot)?;
    let watched_at = recorder.watches_at();
    let (window, meters, reports) = window();
    let host = host(vec![window]);
    let (mut microvm, _) =
        Microvm::restore(frozen, memory, host, None).map_err(ReplayError::from)?;
    recorder.begin(snapshot, &microvm.shared_memory())?;
    let recorder = Arc::new(Mutex::new(Some(recorder)));
    let recorded = recorder.clone();
    let image = snapshot.image_file().and_then(|image| image.try_clone().ok());
    meters.get_or_init(|| Meters {
        kvm: microvm.kvm_counters(),
        memory: microvm.shared_memory(),
        hold: Some(Box::new(move || {
            let mut recorder = recorded.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(recorder) = recorder.as_mut() {
                recorder.end();
            }
            // The check of all memory is no part of the run: it need not wait for storage at each page. What is not cached then
            // is read later.
            if let Some(image) = &image {
                let _ = image.metadata().and_then(|file| preload(image, 0..file.len()));
            }
        })),
    });
    let reports = match microvm.resume() {
        Ok(()) => run(&mut microvm, &reports),
        Err(error) => Err(ReplayError::Resume(error)),
    };
    drop(microvm);
    let recorder = recorder.lock().unwrap_or_else(PoisonError::into_inner).take();
    let mut filled = profile.clone();
    if let Some(recorder) = recorder {
        recorder.finish(&mut filled)?;
    }
    check(&reports?, "the recorded run")?;
    if filled.inputs.iter().all(|known| known != trace) {
        filled.inputs.push(trace.to_owned());
    }
    *profile = filled;
    Ok(watched_at)
}
