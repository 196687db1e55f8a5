//! Command lines of `firn lab run`.

use std::path::Path;

use crate::paths::Paths;
use crate::step::Step;

/// `firn lab run` with `options`, which are separated by spaces.
pub(crate) fn run(paths: &Paths, options: &str) -> Step {
    let step = Step::new(paths.firn()).args(["lab", "run"]);
    if options.is_empty() { step } else { step.args(options.split(' ')) }
}

/// The path in the lab of an input.
pub(crate) fn inside(input: &Path) -> String {
    format!("/in/{}", input.file_name().unwrap_or_default().to_string_lossy())
}

/// The script that makes firn available where cargo built it. Tests of the program firn look for it
/// there.
pub(crate) fn with_firn(paths: &Paths) -> String {
    let built = paths.debug().display().to_string();
    format!("mkdir -p {built}; ln -s /bin/firn {built}/firn")
}
