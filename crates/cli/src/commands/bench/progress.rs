//! Progress of measurements on standard error.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use firn_bench::Progress;

use crate::output;

/// How often there is a line where there is no bar.
const LINE_PERIOD: Duration = Duration::from_secs(60);

/// A bar on a terminal, and elsewhere, such as in a log, a line a minute.
pub(super) struct Bar {
    bar: RefCell<ProgressBar>,
    next_line: Cell<Instant>,
}

impl Bar {
    pub(super) fn new() -> Self {
        Self { bar: RefCell::new(ProgressBar::hidden()), next_line: Cell::new(Instant::now()) }
    }
}

impl Progress for Bar {
    fn begin(&self, steps: u64) {
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {eta} {msg}");
        let bar = ProgressBar::new(steps);
        self.bar.replace(style.map_or(bar.clone(), |style| bar.with_style(style)));
        self.next_line.set(Instant::now() + LINE_PERIOD);
    }

    fn advance(&self, finished: u64, step: &str) {
        let bar = self.bar.borrow();
        bar.set_message(step.to_owned());
        bar.set_position(finished);
        let now = Instant::now();
        if bar.is_hidden() && now >= self.next_line.get() {
            self.next_line.set(now + LINE_PERIOD);
            output::note(&line(finished, bar.length().unwrap_or(finished), bar.elapsed(), step));
        }
    }

    fn end(&self) {
        self.bar.borrow().finish_and_clear();
    }

    fn note(&self, text: &str) {
        self.bar.borrow().suspend(|| output::note(&format!("firn: {text}")));
    }
}

/// `finished` of `steps` are done after `elapsed`; the last one was `step`. The rest is assumed to
/// be as fast.
fn line(finished: u64, steps: u64, elapsed: Duration, step: &str) -> String {
    let rest = steps.saturating_sub(finished);
    let left = elapsed.as_secs().saturating_mul(rest).checked_div(finished).unwrap_or_default();
    let left = HumanDuration(Duration::from_secs(left));
    format!("firn: {finished} of {steps}: {step}; about {left:#} left")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_steps_and_the_time_that_is_left() {
        let text = line(30, 120, Duration::from_secs(60), "pass on json-a");
        assert_eq!(text, "firn: 30 of 120: pass on json-a; about 3m left");
        let text = line(120, 120, Duration::from_secs(60), "pass on json-a");
        assert_eq!(text, "firn: 120 of 120: pass on json-a; about 0s left");
    }
}
