//! The root images that functions may name.

use std::path::PathBuf;

use crate::functions::Version;
use firn_run::{ImageName, ImageNameError};

/// The environment variable of a function's configuration that names its image.
pub(crate) const IMAGE_VARIABLE: &str = "FIRN_IMAGE";

/// The images that there are.
#[derive(Debug)]
pub(crate) struct Images {
    /// Their folder: `NAME.erofs`, but for the base. Without one all functions run on the same root.
    pub(crate) folder: Option<PathBuf>,
}

/// Why a function has no image.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImageError {
    #[error("{IMAGE_VARIABLE}: {0}")]
    Name(ImageNameError),
    #[error(
        "{IMAGE_VARIABLE}: the image {name} is not built on this machine: `firn image build {name}` builds one of firn's own, \
         `firn image build --out {name}` one of yours, `firn image list` shows those that are"
    )]
    Missing { name: String },
}

impl Images {
    /// The image that a version runs on, where it names one that is not the base.
    pub(crate) fn of(&self, version: &Version) -> Result<Option<ImageName>, ImageError> {
        let named = version.environment.get(IMAGE_VARIABLE);
        let (Some(folder), Some(text)) = (&self.folder, named) else { return Ok(None) };
        let name = ImageName::try_from(text.clone()).map_err(ImageError::Name)?;
        if name == ImageName::base() {
            return Ok(None);
        }
        if folder.join(name.as_str()).with_extension("erofs").is_file() {
            Ok(Some(name))
        } else {
            Err(ImageError::Missing { name: name.as_str().to_owned() })
        }
    }
}
