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
}

impl Images {
    /// The file of the image that `version` runs on, if it names one.
    pub(crate) fn of(&self, version: &Version) -> Result<Option<PathBuf>, ImageError> {
        let named = version.environment.get(IMAGE_VARIABLE);
        let (Some(files), Some(text)) = (&self.0, named) else { return Ok(None) };
        let name = ImageName::try_from(text.clone()).map_err(ImageError::Name)?;
        if name == ImageName::base() {
            return Ok(Some(files.base.clone()));
        }
        let path = files.folder.join(name.as_str()).with_extension("erofs");
        if path.is_file() {
            Ok(Some(path))
        } else {
            Err(ImageError::Missing { name: name.as_str().to_owned() })
        }
    }
}
