//! The supervisor of recorded runs: thaws of a snapshot, one for each recorder of its profile.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firn_memory::page_cache::preload;
use firn_memory::recorders::{PageCacheRecorder, Part, ProfileRecordError, ProfileRecorder};
use firn_snapshot::{Destination, ImageKind, Profile, Snapshot};
use firn_vmm::{ControlClient, ControlError};
use parking_lot::Mutex;
use thiserror::Error;

use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::freeze::{FreezeInstanceError, freeze};
use crate::guest::Listener;
use crate::instance::{Instance, OwnedInstance};
use crate::monitor::Supervisor;
use crate::outcome::Outcome;
use crate::player::traces_of;
use crate::recording::RecordingFile;
use crate::report::StartReport;
use crate::spec::{HostSpec, InvokeSpec, OpenedFile, Origin, Recorded, ReplaySpec, SourceSpec};
use crate::spec::{StartSpec, ThawSpec};

/// A snapshot that is thawed to be recorded.
pub struct RecordedThaw<'a> {
    /// The snapshot.
    pub snapshot: &'a Snapshot,
    /// What a guest with Linux is asked.
    pub event: Option<&'a str>,
    /// The name of the input in the profile: of a player the trace that it replays, which is its
    /// first where this is `None`.
    pub input: Option<&'a str>,
    /// The snapshot that a guest with Linux is frozen into after its answer, unless its function
    /// failed. It belongs to a recorder of the page cache.
    pub freeze: Option<&'a Path>,
    /// Whether Linux is tried where the processor has no hardware virtualisation.
    pub software_kvm: bool,
    /// Limit for the guest to wake, and for the function to answer.
    pub limit: Duration,
}

/// Where a recorded thaw gets what it needs for each of its runs.
pub trait RecordingHost {
    /// Why it does not get it.
    type Error: From<RecordError>;

    /// Opens the snapshot for a monitor, and the root disk, if it has one.
    ///
    /// # Errors
    /// That of the caller.
    fn open(
        &self,
        descriptors: &mut Descriptors,
    ) -> Result<(SourceSpec, Option<OpenedFile>), Self::Error>;

    /// Starts a monitor.
    ///
    /// # Errors
    /// That of the caller.
    fn spawn(&self) -> Result<Supervisor, Self::Error>;

    /// Something that people should know and that fails nothing.
    fn note(&self, text: &str);
}

/// Why a run was not recorded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The microVM did not run up to its answer, or its recorder failed.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The recorder of the page cache failed.
    #[error(transparent)]
    PageCache(#[from] ProfileRecordError),
    /// The image's descriptor could not be duplicated.
    #[error("cannot duplicate the descriptor of the image")]
    Image(#[source] io::Error),
    /// The guest was not frozen after its answer.
    #[error("cannot freeze the recorded guest")]
    Freeze(#[source] FreezeInstanceError),
    /// The microVM was not ended.
    #[error("cannot end the recorded microVM")]
    End(#[source] ControlError),
}

impl RecordError {
    /// Whether the cause is a limitation of this host, so that other parts can still be recorded.
    #[must_use]
    pub fn is_host_limitation(&self) -> bool {
        matches!(self, Self::PageCache(error) if error.is_host_limitation())
    }
}

impl RecordedThaw<'_> {
    /// Thaws once, and puts what the recorder finds into `profile`. Returns the answer of a guest
    /// with Linux, which may be the function's failure: then the profile is of no use.
    ///
    /// # Errors
    /// [`RecordError`], or the error of `host`; `profile` stays as it was.
    pub fn record<H: RecordingHost>(
        &self,
        recorder: ProfileRecorder,
        host: &H,
        profile: &mut Profile,
    ) -> Result<Option<Outcome>, H::Error> {
        let outcome = match recorder {
            ProfileRecorder::Touches(parts) => self.touches(parts, host, profile),
            ProfileRecorder::PageCache(recorder) => self.page_cache(recorder, host, profile),
        }?;
        let first = || traces_of(self.snapshot.manifest())?.first().copied();
        if let Some(input) = self.input.or_else(first)
            && profile.inputs.iter().all(|known| known != input)
        {
            profile.inputs.push(input.to_owned());
        }
        Ok(outcome)
    }

    /// The monitor records.
    fn touches<H: RecordingHost>(
        &self,
        parts: Vec<Part>,
        host: &H,
        profile: &mut Profile,
    ) -> Result<Option<Outcome>, H::Error> {
        let mut descriptors = Descriptors::default();
        let recording = RecordingFile::create(Recorded::Profile(parts), &mut descriptors);
        let (file, record) = recording.map_err(RecordError::from)?;
        // The contents of memory come from no plan: this one only opens the snapshot.
        let in_pool = self.snapshot.image_file().is_none();
        let planner = if in_pool { "pass_shared" } else { "firecracker" };
        let thaw = ThawSpec { record: Some(record), ..self.thaw(planner, host, &mut descriptors)? };
        let supervisor = host.spawn()?;
        let (_claimed, spec) = self.spec(thaw, &mut descriptors).map_err(RecordError::from)?;
        let watcher = Arc::new(Watcher::default());
        let listener: Arc<dyn Listener> = watcher.clone();
        let run = supervisor.run(spec, descriptors, &listener);
        watcher.take_notes().iter().for_each(|note| host.note(note));
        run.map_err(RecordError::from)?;
        let manifest = self.snapshot.manifest();
        let recorded = file.profile(manifest.description.id, manifest.layout.pages());
        let Profile { faults, written, small_leaves, .. } = recorded.map_err(RecordError::from)?;
        if faults.is_some() {
            (profile.faults, profile.small_leaves) = (faults, small_leaves);
        }
        profile.written = written.or_else(|| profile.written.take());
        Ok(watcher.outcome.lock().take())
    }

    /// This process records, from the page cache.
    fn page_cache<H: RecordingHost>(
        &self,
        mut recorder: Box<dyn PageCacheRecorder>,
        host: &H,
        profile: &mut Profile,
    ) -> Result<Option<Outcome>, H::Error> {
        recorder.prepare(self.snapshot).map_err(RecordError::from)?;
        if let Some(at) = recorder.watches_at() {
            host.note(&format!("the page cache is watched at {at}"));
        }
        let image = self.snapshot.image_file().map(File::try_clone).transpose();
        let image = image.map_err(RecordError::Image)?;
        let mut descriptors = Descriptors::default();
        let thaw = self.thaw(recorder.planner(), host, &mut descriptors)?;
        let supervisor = host.spawn()?;
        let (claimed, spec) = self.spec(thaw, &mut descriptors).map_err(RecordError::from)?;
        let freezing = self.freezing(&claimed);
        let recorder = Mutex::new(Some(recorder));
        let watcher = Arc::new(Watcher { recorder, image, freezing, ..Watcher::default() });
        let listener: Arc<dyn Listener> = watcher.clone();
        let begin = |process| match &mut *watcher.recorder.lock() {
            Some(recorder) => Ok::<_, RecordError>(recorder.begin(self.snapshot, process)?),
            None => Ok(()),
        };
        let run = supervisor.run_from_ready(spec, descriptors, begin, &listener);
        let mut filled = profile.clone();
        let recorder = watcher.recorder.lock().take();
        let recorded = recorder.map_or(Ok(()), |recorder| recorder.finish(&mut filled));
        watcher.take_notes().iter().for_each(|note| host.note(note));
        run?;
        recorded.map_err(RecordError::from)?;
        watcher.frozen.lock().take().map_or(Ok(()), Err)?;
        *profile = filled;
        Ok(watcher.outcome.lock().take())
    }

    fn thaw<H: RecordingHost>(
        &self,
        planner: &str,
        host: &H,
        descriptors: &mut Descriptors,
    ) -> Result<ThawSpec, H::Error> {
        let (source, root) = host.open(descriptors)?;
        let invoke = self.event.map(|event| InvokeSpec {
            event: event.to_owned(),
            keep: self.freeze.is_some(),
            compare: false,
        });
        let trace = self.input.filter(|_| self.event.is_none());
        let input = trace.map(ToOwned::to_owned);
        let replay = ReplaySpec { input, hold: true, ..ReplaySpec::default() };
        let planner = planner.to_owned();
        Ok(ThawSpec { source, planner, preloaded: false, root, invoke, replay, record: None })
    }

    fn spec(
        &self,
        thaw: ThawSpec,
        descriptors: &mut Descriptors,
    ) -> Result<(OwnedInstance, StartSpec), StartError> {
        let (claimed, host) = HostSpec::claim(None, None, thaw.root.is_some(), descriptors)?;
        let host = HostSpec { software_kvm: self.software_kvm, ..host };
        Ok((claimed, StartSpec::new(Origin::Thaw(thaw), host, self.limit)))
    }

    fn freezing(&self, instance: &Instance) -> Option<Freezing> {
        let to = Destination::Directory(self.freeze?.to_owned());
        let dense = self.snapshot.manifest().image.kind == ImageKind::Dense;
        Some(Freezing { instance: instance.clone(), to, dense })
    }
}

/// The freeze that follows the answer.
struct Freezing {
    instance: Instance,
    to: Destination,
    dense: bool,
}

impl Freezing {
    /// Freezes the microVM, unless its function failed, and ends it.
    fn run(&self, outcome: Option<&Outcome>) -> Result<(), RecordError> {
        let end = || ControlClient::connect(&self.instance.control_socket())?.stop();
        if outcome.is_none_or(|outcome| outcome.error.is_some()) {
            return end().map_err(RecordError::End);
        }
        let frozen = freeze(&self.instance, self.to.clone(), self.dense, false, None);
        if frozen.is_err() {
            // The first failure is the one to report.
            let _ = end();
        }
        frozen.map(drop).map_err(RecordError::Freeze)
    }
}

/// Follows a recorded run.
#[derive(Default)]
struct Watcher {
    recorder: Mutex<Option<Box<dyn PageCacheRecorder>>>,
    /// The image of a player, which checks all of it after the run.
    image: Option<File>,
    freezing: Option<Freezing>,
    outcome: Mutex<Option<Outcome>>,
    frozen: Mutex<Option<RecordError>>,
    notes: Mutex<Vec<String>>,
}

impl Watcher {
    fn ended(&self) {
        if let Some(recorder) = &mut *self.recorder.lock() {
            recorder.end();
        }
    }

    fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut self.notes.lock())
    }
}

impl Listener for Watcher {
    fn answered(&self, outcome: &Outcome) {
        self.ended();
        *self.outcome.lock() = Some(outcome.clone());
    }

    fn started(&self, _: &StartReport) {
        if let Some(freezing) = &self.freezing {
            let frozen = freezing.run(self.outcome.lock().as_ref());
            *self.frozen.lock() = frozen.err();
        }
    }

    fn held(&self) {
        self.ended();
        // The check of all memory is no part of the run, so it need not wait for storage at each
        // page. A page that is not cached then is read later.
        if let Some(image) = &self.image {
            let _ = image.metadata().and_then(|file| preload(image, 0..file.len()));
        }
    }

    fn note(&self, text: &str) {
        self.notes.lock().push(text.to_owned());
    }
}
