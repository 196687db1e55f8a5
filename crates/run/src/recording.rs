//! A run that is recorded: its monitor records, and its supervisor reads what came of it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_agent::protocol::Pages;
use firn_base::ErrorChain;
use firn_memory::GuestMemory;
use firn_memory::pager::{PageStore, end_process};
use firn_memory::recorders::{self, RecordError, Recorder, Touches};
use firn_memory::trace::{GapUnit, Trace, TraceOrigin};
use firn_snapshot::{MemoryLayout, PageSet, Profile, Snapshot};
use firn_vmm::{AttributionControl, GuestTimeTotals, Microvm, TracepointFormat, fault_attribution};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use uuid::Uuid;

use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::guest::Listener;
use crate::outcome::Outcome;
use crate::report::StartReport;
use crate::spec::{RecordSpec, Recorded};

/// Bytes of the largest recording.
const MAX_RECORDING: u64 = 1 << 30;

/// The monitor's side: a run that is being recorded.
pub(crate) struct Recording {
    state: Arc<Mutex<Option<State>>>,
    out: File,
}

struct State {
    recorder: Kind,
    /// Whether a second invocation will follow an answer.
    has_second: bool,
    /// What the guest told of its pages.
    pages: Option<Pages>,
    failure: Option<RecordError>,
}

enum Kind {
    Profile(Touches),
    Trace(Recorder, AttributionControl),
}

impl Recording {
    /// Returns guest memory with the contents of a snapshot, and the recorder of its touches.
    pub(crate) fn start(
        spec: &RecordSpec,
        snapshot: &Snapshot,
        descriptors: &mut Descriptors,
    ) -> Result<(GuestMemory, Self), StartError> {
        let out = File::from(descriptors.take(spec.out)?);
        let (memory, recorder) = match &spec.what {
            Recorded::Profile(parts) => {
                let (memory, touches) = Touches::start(snapshot, parts.clone())?;
                (memory, Kind::Profile(touches))
            }
            Recorded::Trace { again, .. } => {
                let (attribution, control) = fault_attribution();
                let (store, observer) = (PageStore::of(snapshot), Box::new(attribution));
                let layout = &snapshot.manifest().layout;
                let (memory, recorder) = match again {
                    Some(period) => {
                        Recorder::start_sampled(store, layout, observer, end_process, *period)
                    }
                    None => Recorder::start(store, layout, observer, end_process),
                }?;
                (memory, Kind::Trace(recorder, control))
            }
        };
        let state = State { recorder, has_second: spec.has_second(), pages: None, failure: None };
        Ok((memory, Self { state: Arc::new(Mutex::new(Some(state))), out }))
    }

    /// Called right before the vCPUs run.
    pub(crate) fn begin(
        &self,
        microvm: &mut Microvm,
        listener: &Arc<dyn Listener>,
    ) -> Result<(), StartError> {
        match self.state.lock().as_mut().map(|state| &mut state.recorder) {
            Some(Kind::Profile(touches)) => touches.begin(&microvm.shared_memory()),
            Some(Kind::Trace(_, control)) => {
                control.attach(microvm, |thread| listener.tracepoints(thread))?;
            }
            None => {}
        }
        Ok(())
    }

    /// What the run reports to: it passes everything on, and divides the recording.
    pub(crate) fn listener(&self, to: Arc<dyn Listener>) -> Arc<dyn Listener> {
        Arc::new(Divider { state: self.state.clone(), to })
    }

    /// Writes the recording. The microVM has ended.
    pub(crate) fn finish(mut self, snapshot: &Snapshot) -> Result<(), StartError> {
        let Some(State { recorder, pages, failure, .. }) = self.state.lock().take() else {
            return Ok(());
        };
        failure.map_or(Ok(()), Err)?;
        let manifest = snapshot.manifest();
        let bytes = match recorder {
            Kind::Profile(touches) => {
                let mut profile = Profile::of(manifest.description.id);
                touches.finish(&mut profile)?;
                serde_json::to_vec(&profile).map_err(io::Error::from)
            }
            Kind::Trace(recorder, control) => {
                let recorders::Recording { touches, unknown_leaves, again } = recorder.finish()?;
                let (time, mut instructions) = control.finish()?;
                if pages.is_none() {
                    instructions.clear();
                }
                let totals = TraceTotals { unknown_leaves, time, pages, instructions };
                let (layout, zero_map) = (manifest.layout.clone(), snapshot.zero_map().clone());
                let mut trace = Trace::new(unknown_origin(), layout, zero_map, touches)?;
                if let Some(again) = again {
                    trace = trace.with_again(again)?;
                }
                let trace = trace.encode()?;
                let totals = serde_json::to_vec(&totals).map_err(io::Error::from);
                totals.map(|totals| [totals, b"\n".to_vec(), trace].concat())
            }
        };
        let written = bytes.and_then(|bytes| self.out.write_all(&bytes));
        written.map_err(|error| StartError::session("write the recording", error))
    }
}

/// The supervisor knows the origin.
fn unknown_origin() -> TraceOrigin {
    let unknown = String::new;
    TraceOrigin {
        function: unknown(),
        input: unknown(),
        command: unknown(),
        host: unknown(),
        gaps: GapUnit::Nanoseconds,
    }
}

/// Tells a recorder where the request begins and where it has been answered.
struct Divider {
    state: Arc<Mutex<Option<State>>>,
    to: Arc<dyn Listener>,
}

impl Divider {
    fn ended(&self, is_answered: bool) {
        let mut state = self.state.lock();
        let Some(State { recorder, has_second, failure, .. }) = &mut *state else { return };
        match recorder {
            Kind::Profile(touches) => touches.end(),
            Kind::Trace(recorder, _) if std::mem::take(has_second) && is_answered => {
                *failure = recorder.start_second().err();
            }
            Kind::Trace(recorder, _) => recorder.stop_recording(),
        }
    }
}

impl Listener for Divider {
    fn started(&self, report: &StartReport) {
        self.to.started(report);
    }

    fn asked(&self) {
        if let Some(State { recorder: Kind::Trace(recorder, _), .. }) = &*self.state.lock() {
            recorder.start_request();
        }
        self.to.asked();
    }

    fn answered(&self, outcome: &Outcome) {
        self.ended(outcome.error.is_none());
        self.to.answered(outcome);
    }

    fn described(&self, pages: Pages) {
        if let Some(state) = &mut *self.state.lock() {
            state.pages = Some(pages);
        }
    }

    /// A player checks its memory at once.
    fn held(&self) {
        self.ended(false);
    }

    fn tracepoints(&self, thread: u32) -> Result<(TracepointFormat, [OwnedFd; 2]), StartError> {
        self.to.tracepoints(thread)
    }

    fn sized(&self, memory: u64, disk: u64) {
        self.to.sized(memory, disk);
    }

    fn note(&self, text: &str) {
        self.to.note(text);
    }
}

/// What is known of a trace's recording besides the trace.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TraceTotals {
    /// Touches through a leaf that could not be found out; the trace has 4 KiB for them.
    pub unknown_leaves: u64,
    /// The vCPU's time in guest mode.
    pub time: GuestTimeTotals,
    /// What held the guest's pages at the end, if it was to describe that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages: Option<Pages>,
    /// If so: by guest page, the linear address of the instruction that touched it first.
    #[serde(default, skip_serializing_if = "HashMap::is_empty")]
    pub instructions: HashMap<u64, u64>,
}

/// The supervisor's side: the file that a monitor writes its recording to. A guest that has taken
/// its monitor over can write anything there.
#[derive(Debug)]
pub struct RecordingFile(File);

/// What a monitor recorded cannot be read.
#[derive(Debug, Error)]
#[error("the monitor's recording of the run is not valid")]
struct ReadError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl RecordingFile {
    /// Makes the file, in memory, and the part of a spec that has it.
    ///
    /// # Errors
    /// [`StartError::Session`].
    pub fn create(
        what: Recorded,
        descriptors: &mut Descriptors,
    ) -> Result<(Self, RecordSpec), StartError> {
        let create = || {
            let file = File::from(memfd_create("recording", MemfdFlags::CLOEXEC)?);
            let theirs = file.try_clone()?;
            Ok((file, theirs))
        };
        let (file, theirs) =
            create().map_err(|error| StartError::session("make a file in memory", error))?;
        let out = descriptors.add(theirs);
        Ok((Self(file), RecordSpec { what, out }))
    }

    /// The recorded parts of the profile of a snapshot with this id and so many pages of memory.
    ///
    /// # Errors
    /// [`StartError::Record`]: it is no valid profile of the snapshot.
    pub fn profile(self, snapshot: Uuid, pages: u64) -> Result<Profile, StartError> {
        let profile: Profile = serde_json::from_slice(&self.bytes()?).map_err(invalid)?;
        profile.check(snapshot, pages).map_err(invalid)?;
        Ok(profile)
    }

    /// The trace, of this origin, of a guest with memory of this layout and these zero pages.
    ///
    /// # Errors
    /// [`StartError::Record`]: it is no valid trace.
    pub fn trace(
        self,
        origin: TraceOrigin,
        layout: MemoryLayout,
        zero_map: PageSet,
    ) -> Result<(Trace, TraceTotals), StartError> {
        let bytes = self.bytes()?;
        let line = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
        let (totals, trace) = bytes.split_at(line);
        let totals = serde_json::from_slice(totals).map_err(invalid)?;
        let found = Trace::decode(trace.get(1..).unwrap_or_default()).map_err(invalid)?;
        let trace = Trace::new(origin, layout, zero_map, found.touches().to_vec())?;
        let trace = match found.again() {
            Some(again) => trace.with_again(again.clone())?,
            None => trace,
        };
        Ok((trace, totals))
    }

    fn bytes(mut self) -> Result<Vec<u8>, StartError> {
        let mut bytes = Vec::new();
        let read =
            self.0.rewind().and_then(|()| self.0.take(MAX_RECORDING).read_to_end(&mut bytes));
        read.map_err(invalid)?;
        Ok(bytes)
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StartError {
    StartError::Record(ErrorChain::of(&ReadError(error.into())))
}

#[cfg(test)]
#[path = "recording_tests.rs"]
mod tests;
