//! Builds root file systems for functions.

use std::path::PathBuf;

use crate::scripts::{ScriptError, Scripts};

/// An image to build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageBuild {
    /// One of firn's own images, by name.
    Own(String),
    /// An image with packages that the caller chooses.
    Custom {
        /// A name for the cache, or a file (a path that contains a `/`).
        out: String,
        /// The image to add to: a name or a file.
        from: String,
        /// Names of Debian packages.
        packages: Vec<String>,
        /// A list of requirements for pip.
        requirements: Option<PathBuf>,
    },
}

/// Builds an image and the layers that it needs. An image in the cache is built again only if its contents changed.
///
/// # Errors
///
/// The build script cannot be started, fails, or is stopped by a signal.
pub fn build_image(image: &ImageBuild) -> Result<(), ScriptError> {
    Scripts::unpack()?.run("guest/image.sh", script_arguments(image))
}

fn script_arguments(image: &ImageBuild) -> Vec<String> {
    let (out, from, packages, requirements) = match image {
        ImageBuild::Own(name) => return vec![name.clone()],
        ImageBuild::Custom { out, from, packages, requirements } => {
            (out, from, packages, requirements)
        }
    };
    let mut words = vec!["--out".to_owned(), out.clone(), "--from".to_owned(), from.clone()];
    if !packages.is_empty() {
        words.extend(["--packages".to_owned(), packages.join(",")]);
    }
    if let Some(path) = requirements {
        words.extend(["--requirements".to_owned(), path.display().to_string()]);
    }
    words
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
