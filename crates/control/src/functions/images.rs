//! The root images that functions can choose.

use std::path::PathBuf;

use firn_run::{ImageName, ImageNameError};

use super::Version;

/// The environment variable of a function's configuration that names its image.
pub(crate) const IMAGE_VARIABLE: &str = "FIRN_IMAGE";

/// The files of the images on this host.
#[derive(Debug, Clone)]
pub struct ImageFiles {
    /// The base image.
    pub base: PathBuf,
    /// The folder with a file `NAME.erofs` for each other image.
    pub folder: PathBuf,
}

/// The images that functions can choose; `None` if all functions run on the same root.
#[derive(Debug)]
pub(crate) struct Images(pub(crate) Option<ImageFiles>);

/// A function's image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Its name is not valid.
    #[error("{IMAGE_VARIABLE}: {0}")]
    Name(ImageNameError),
    /// There is no such image.
    #[error(
        "{IMAGE_VARIABLE}: the image {name} is not built on this machine: `firn image build {name}` builds one of firn's own, \
         `firn image build --out {name}` builds your own, `firn image list` lists those that are built"
    )]
    Missing {
        /// The image's name.
        name: String,
    },
    /// The image of its runtime is not built.
    #[error(
        "the runtime {name} runs on the image {name}, which is not built on this machine: `firn image build {name}` builds it"
    )]
    Runtime {
        /// The name of the runtime, and of its image.
        name: &'static str,
    },
}

impl Images {
    /// The file of the image that `version` runs on: the one that it names, or that of its runtime.
    /// `None` for the daemon's image.
    pub(crate) fn of(&self, version: &Version) -> Result<Option<PathBuf>, ImageError> {
        let Some(files) = &self.0 else { return Ok(None) };
        let existing = |name: &str| {
            Some(files.folder.join(format!("{name}.erofs"))).filter(|path| path.is_file())
        };
        let Some(text) = version.environment.get(IMAGE_VARIABLE) else {
            let Some(name) = version.runtime.image() else { return Ok(None) };
            return existing(name).map(Some).ok_or(ImageError::Runtime { name });
        };
        let name = ImageName::try_from(text.clone()).map_err(ImageError::Name)?;
        if name == ImageName::base() {
            return Ok(Some(files.base.clone()));
        }
        let missing = || ImageError::Missing { name: name.as_str().to_owned() };
        existing(name.as_str()).map(Some).ok_or_else(missing)
    }
}
