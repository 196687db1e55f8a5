//! Work that goes on beside the guest: the steps that the plan has after the resume, and the
//! loader. A start does not wait for it before the guest is ready or has answered.

use std::sync::Arc;
use std::thread::JoinHandle;

use firn_base::error_chain;
use firn_memory::loader::{Loader, LoaderReport};
use firn_memory::{AfterResume, GuestMemory, StepError};

/// The steps and the loader of a microVM.
pub(crate) struct Background {
    schedule: Option<JoinHandle<Result<(), StepError>>>,
    loader: Option<Loader>,
    /// What the loader did, once it has ended.
    loaded: Option<LoaderReport>,
    /// Why the loader failed.
    failure: Option<String>,
}

impl Background {
    /// Starts the steps; the loader, where there is one, is at work.
    pub(crate) fn start(
        schedule: Option<AfterResume>,
        memory: Arc<GuestMemory>,
        loader: Option<Loader>,
    ) -> Self {
        let run =
            |schedule: AfterResume| std::thread::spawn(move || schedule.run(&memory).map(drop));
        Self { schedule: schedule.map(run), loader, loaded: None, failure: None }
    }

    /// What the loader did, once it has ended; before, what it is to load.
    pub(crate) fn loaded(&mut self) -> Option<LoaderReport> {
        if let Some(loader) = self.loader.take_if(|loader| loader.has_ended()) {
            self.end(loader);
        }
        self.loader.as_ref().map(Loader::begun).or(self.loaded)
    }

    /// Waits for the end of all. A restore whose schedule fails is a failed restore. A failure of
    /// the loader is not: a page that it did not load is read when it is touched
    /// ([`Background::loader_failure`]).
    pub(crate) fn finish(&mut self) -> Result<(), StepError> {
        if let Some(schedule) = self.schedule.take() {
            schedule.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        if let Some(loader) = self.loader.take() {
            self.end(loader);
        }
        Ok(())
    }

    /// Why the loader failed, if it did; returned once.
    pub(crate) fn loader_failure(&mut self) -> Option<String> {
        self.failure.take()
    }

    fn end(&mut self, loader: Loader) {
        let begun = loader.begun();
        self.loaded = Some(loader.finish().unwrap_or_else(|error| {
            self.failure = Some(format!("the loader failed: {}", error_chain(&error)));
            begun
        }));
    }
}

#[cfg(test)]
#[path = "background_tests.rs"]
mod tests;
