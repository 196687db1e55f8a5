//! What a function requires of its microVM, in the file `function.toml` beside its code.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The file's name.
pub const SETTINGS_FILE: &str = "function.toml";

/// The settings of a function in [`SETTINGS_FILE`]. All are optional.
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
    /// Folders of other functions, relative to this one, whose files this function has too. Of
    /// several files with one name the last folder's counts, and this function's own before all.
    pub files_of: Vec<PathBuf>,
    /// By key: how far a number in the answer may differ from the expected one on another
    /// processor. Numbers without an entry are the same everywhere.
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

/// The text is not valid settings.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct SettingsError(#[from] toml::de::Error);

/// The name of an image in firn's cache: 1 to 64 of a-z, 0-9, - and ., not starting with - or a
/// period.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageName(String);

impl ImageName {
    /// The image with Python and little else, for functions that name none.
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
#[error("{name:?} cannot name an image: use 1 to 64 of a-z, 0-9, - and .")]
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
        let fits =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
        if (1..=64).contains(&name.len()) && name.bytes().all(fits) && !name.starts_with(['-', '.'])
        {
            Ok(Self(name))
        } else {
            Err(ImageNameError { name })
        }
    }
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
