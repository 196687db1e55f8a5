//! What a function asks of its microVM, in the file `function.toml` beside its code.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The file's name.
pub const SETTINGS_FILE: &str = "function.toml";

/// What a function says of itself in [`SETTINGS_FILE`]. Everything may be left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FunctionSettings {
    /// The root file system that it runs on: a name of `firn image`.
    pub image: Option<ImageName>,
    /// Guest memory that it needs, MiB.
    pub memory_mib: Option<u64>,
    /// vCPUs that it needs.
    pub vcpus: Option<u8>,
    /// Where it comes from, for people.
    pub source: Option<String>,
    /// Other functions' folders, relative to this one, whose files this function has too. Of files
    /// of one name the later folder's is taken, and this function's own before all.
    pub files_of: Vec<PathBuf>,
    /// How far a number of the answer may be off the expected one on another processor, by its key.
    /// What has none is the same everywhere.
    pub tolerance: BTreeMap<String, f64>,
}

impl FunctionSettings {
    /// Reads the text of a [`SETTINGS_FILE`].
    ///
    /// # Errors
    /// What is wrong, with its line.
    pub fn parse(text: &str) -> Result<Self, SettingsError> {
        Ok(toml::from_str(text)?)
    }
}

/// A text that holds no settings.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct SettingsError(#[from] toml::de::Error);

/// The name of an image in firn's cache: 1 to 64 of a-z, 0-9 and -, not starting with -.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageName(String);

impl ImageName {
    /// The image that has Python and little else: what a function gets that names none.
    #[must_use]
    pub fn base() -> Self {
        Self("base".to_owned())
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A text that cannot name an image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} cannot name an image: use 1 to 64 of a-z, 0-9 and -")]
pub struct ImageNameError {
    name: String,
}

impl From<ImageName> for String {
    fn from(name: ImageName) -> Self {
        name.0
    }
}

impl TryFrom<String> for ImageName {
    type Error = ImageNameError;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if (1..=64).contains(&name.len()) && name.bytes().all(fits) && !name.starts_with('-') {
            Ok(Self(name))
        } else {
            Err(ImageNameError { name })
        }
    }
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
