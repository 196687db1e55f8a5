//! A replay that is recorded.

use std::sync::Arc;

use firn_memory::page_cache::preload;
use firn_memory::recorders::{ProfileRecordError, ProfileRecorder};
use firn_snapshot::Profile;
use parking_lot::Mutex;
use thiserror::Error;

use super::replay::{Player, check};
use crate::error::StartError;
use crate::life::{Clock, KvmDevice};
use crate::source::Source;
use crate::spec::ReplaySpec;

/// Why a run was not recorded.
#[derive(Debug, Error)]
pub enum RecordRunError {
    /// The microVM did not run up to its answer, or to its last touch.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The recorder failed.
    #[error(transparent)]
    Recorder(#[from] ProfileRecordError),
}

/// Thaws the player of a source over the recorder's memory, lets it replay a trace (the first,
/// where `input` names none) up to its last touch under the recorder, and then check all its
/// memory. The recorder's parts go into `profile`, and the trace's name among its inputs. Returns
/// where in the kernel the recorder watched, if that depends on the kernel.
///
/// # Errors
/// See [`RecordRunError`]; `profile` stays as it was. A page that differs from what was frozen ends
/// this process where the recorder serves memory.
pub fn record(
    source: &Source,
    input: Option<&str>,
    mut recorder: Box<dyn ProfileRecorder>,
    kvm: KvmDevice,
    profile: &mut Profile,
) -> Result<Option<String>, RecordRunError> {
    let input = input.map(ToOwned::to_owned);
    let mut player = Player::new(source, &ReplaySpec { input, ..ReplaySpec::default() })?;
    let snapshot = source.snapshot();
    let memory = recorder.memory(snapshot)?;
    let watched_at = recorder.watches_at();
    let mut mapped = source.recorded(memory, kvm, &Clock::now())?;
    if recorder.faults_in_vcpu_threads() {
        mapped.machine_mut().fault_in_vcpu_threads();
    }
    let host = player.set_up(mapped.machine_mut());
    let restored = mapped.restore(host, None)?;
    recorder.begin(snapshot, &restored.microvm.shared_memory())?;
    let recorder = Arc::new(Mutex::new(Some(recorder)));
    let recorded = recorder.clone();
    let image = snapshot.image_file().and_then(|image| image.try_clone().ok());
    let end = move || {
        if let Some(recorder) = recorded.lock().as_mut() {
            recorder.end();
        }
        // The check of all memory is no part of the run, so it need not wait for storage at each
        // page. A page that is not cached then is read later.
        if let Some(image) = &image {
            let _ = image.metadata().and_then(|file| preload(image, 0..file.len()));
        }
    };
    player.connect(&restored.microvm, Some(Box::new(end)));
    let reports = restored.resume().and_then(|mut running| player.run(&mut running.microvm));
    let recorder = recorder.lock().take();
    let mut filled = profile.clone();
    if let Some(recorder) = recorder {
        recorder.finish(&mut filled)?;
    }
    check(&reports?, "the recorded run")?;
    if filled.inputs.iter().all(|known| *known != player.trace) {
        filled.inputs.push(player.trace);
    }
    *profile = filled;
    Ok(watched_at)
}
