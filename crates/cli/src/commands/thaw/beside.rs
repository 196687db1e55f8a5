//! What goes on beside the guest: the steps after the resume, and the loader. Nothing waits for them before the guest is ready or
//! has answered.

use std::sync::Arc;
use std::thread::JoinHandle;

use firn_base::error_chain;
use firn_memory::loader::{Loader, LoaderReport};
use firn_memory::{AfterResume, GuestMemory, StepError};

use crate::output;

/// The steps and the loader of a microVM.
pub(super) struct Beside {
    schedule: Option<JoinHandle<Result<(), StepError>>>,
    loader: Option<Loader>,
    /// What the loader did, once it has ended.
    loaded: Option<LoaderReport>,
}

impl Beside {
    /// Starts the steps; the loader, where there is one, is at work.
    pub(super) fn start(
        schedule: AfterResume,
        memory: Arc<GuestMemory>,
        loader: Option<Loader>,
    ) -> Self {
        let schedule = std::thread::spawn(move || schedule.run(&memory).map(drop));
        Self { schedule: Some(schedule), loader, loaded: None }
    }

    /// What the loader did, where it has ended; else what it is to load.
    pub(super) fn loaded(&mut self) -> Option<LoaderReport> {
        if let Some(loader) = self.loader.take_if(|loader| loader.has_ended()) {
            self.loaded = Some(ended(loader));
        }
        self.loader.as_ref().map(Loader::begun).or(self.loaded)
    }

    /// Waits for the end of all. A restore whose schedule fails is a failed restore.
    pub(super) fn finish(&mut self) -> Result<(), StepError> {
        if let Some(schedule) = self.schedule.take() {
            schedule.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        if let Some(loader) = self.loader.take() {
            self.loaded = Some(ended(loader));
        }
        Ok(())
    }
}

/// Waits for the end of a loader. Its failure is told, and is no failure of the restore's: a page that was not loaded is read when
/// it is touched.
fn ended(loader: Loader) -> LoaderReport {
    let begun = loader.begun();
    loader.finish().unwrap_or_else(|error| {
        output::note(&format!("firn: the loader failed: {}", error_chain(&error)));
        begun
    })
}

#[cfg(test)]
#[path = "beside_tests.rs"]
mod tests;
