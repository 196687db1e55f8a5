//! Command lines of `firn lab run`.

use std::path::Path;

use crate::paths::Paths;
use crate::step::Step;

/// The exit code of `firn lab run` when the lab itself failed. QEMU's emulation of nested guests
/// does not last for ever: the lab's own kernel can panic or stand still.
const LAB_ENDED: i32 = 125;

/// `firn lab run` with `options`, which are separated by spaces. Another lab runs the command of
/// one that ended before it.
pub(crate) fn run(paths: &Paths, options: &str) -> Step {
    let step = Step::new(paths.firn()).args(["lab", "run"]).again_after(LAB_ENDED);
    if options.is_empty() { step } else { step.args(options.split(' ')) }
}

/// The path in the lab of an input.
pub(crate) fn inside(input: &Path) -> String {
    format!("/in/{}", input.file_name().unwrap_or_default().to_string_lossy())
}

/// The script that makes firn's programs available where cargo built them. Their tests look for
/// them there.
pub(crate) fn with_firn(paths: &Paths) -> String {
    let built = paths.debug().display().to_string();
    format!("mkdir -p {built}; ln -s /bin/firn /bin/firn-monitor {built}")
}
