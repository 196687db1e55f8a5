//! Progress of a measurement.

/// Receives the progress of a measurement. Every method does nothing by default.
pub trait Progress {
    /// A measurement of `steps` steps begins.
    fn begin(&self, steps: u64) {
        let _ = steps;
    }

    /// `finished` of the steps are done; `step` describes the current one.
    fn advance(&self, finished: u64, step: &str) {
        let _ = (finished, step);
    }

    /// The measurement has ended, with or without an error.
    fn end(&self) {}

    /// Something happened that is not part of the results, such as a part of a profile that could
    /// not be recorded.
    fn note(&self, text: &str) {
        let _ = text;
    }
}

/// Ignores the progress.
#[derive(Clone, Copy, Debug)]
pub struct Quiet;

impl Progress for Quiet {}

/// One of several measurements: its name begins each of its steps.
pub(crate) struct Part<'a> {
    pub(crate) name: &'a str,
    pub(crate) progress: &'a dyn Progress,
}

impl Progress for Part<'_> {
    fn begin(&self, steps: u64) {
        self.progress.begin(steps);
    }

    fn advance(&self, finished: u64, step: &str) {
        self.progress.advance(finished, &format!("{}: {step}", self.name));
    }

    fn end(&self) {
        self.progress.end();
    }

    fn note(&self, text: &str) {
        self.progress.note(text);
    }
}

/// Counts the steps of one measurement, and reports its end when it is dropped.
pub(crate) struct Steps<'a> {
    progress: &'a dyn Progress,
    finished: u64,
}

impl<'a> Steps<'a> {
    pub(crate) fn begin(progress: &'a dyn Progress, steps: u64) -> Self {
        progress.begin(steps);
        Self { progress, finished: 0 }
    }

    /// One more step is done.
    pub(crate) fn advance(&mut self, step: &str) {
        self.finished += 1;
        self.progress.advance(self.finished, step);
    }
}

impl Drop for Steps<'_> {
    fn drop(&mut self) {
        self.progress.end();
    }
}
