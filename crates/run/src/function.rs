//! A function on disk.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firn_agent::protocol::{MAX_FUNCTION_BYTES, MAX_FUNCTION_FILES};
use serde::{Deserialize, Serialize};

use crate::settings::{FunctionSettings, SETTINGS_FILE, SettingsError};

/// The required file in a function's folder, without its extension.
const MODULE: &str = "handler";

/// A Python function: `handler(event, context)` as AWS Lambda calls it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Function {
    name: String,
    handler: String,
    files: BTreeMap<String, Vec<u8>>,
    settings: FunctionSettings,
}

/// Why a path holds no function.
#[derive(Debug, thiserror::Error)]
pub enum FunctionPathError {
    /// There is nothing at the path.
    #[error("{} does not exist: name a function's folder or its .py file", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A file or folder could not be read.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A single file that is not Python.
    #[error(
        "{} is not Python: a function is a .py file, or a folder that holds handler.py",
        path.display()
    )]
    NotPython {
        /// The file.
        path: PathBuf,
    },
    /// A folder without a handler.
    #[error(
        "{} holds no handler.py: put `def handler(event, context)` into a file of that name",
        path.display()
    )]
    NoHandler {
        /// The folder.
        path: PathBuf,
    },
    /// The function's settings are not valid.
    #[error("{} has settings that are not valid", path.display())]
    Settings {
        /// The settings' file.
        path: PathBuf,
        /// What is wrong with them.
        source: SettingsError,
    },
    /// The name of the file or folder cannot name a function.
    #[error("{name:?} cannot name a function: use 1 to 64 letters, digits, hyphens or underscores")]
    Name {
        /// The name.
        name: String,
    },
    /// The function has something that is neither file nor folder, or a name that is not UTF-8.
    #[error(
        "{} cannot be sent to a guest: a function is made of plain files and folders with UTF-8 names",
        path.display()
    )]
    NotPlain {
        /// The file.
        path: PathBuf,
    },
    /// The function's files are too large together.
    #[error(
        "the files in {} are over the limit of {MAX_FUNCTION_BYTES} bytes: install large libraries \
         into the guest's root file system instead",
        path.display()
    )]
    TooLarge {
        /// The function.
        path: PathBuf,
    },
    /// The function has too many files.
    #[error(
        "{} holds over {MAX_FUNCTION_FILES} files: install large libraries into the guest's root \
         file system instead",
        path.display()
    )]
    TooMany {
        /// The function.
        path: PathBuf,
    },
}

impl Function {
    /// Reads the function at `path`: a folder that holds `handler.py` (with everything beside it
    /// but hidden files and `__pycache__`, and the files of the folders that its
    /// [`SETTINGS_FILE`] names), or a single `.py` file. The function to call is named
    /// `handler` in both; the folder or file names the function.
    ///
    /// # Errors
    /// [`FunctionPathError`] names the file and the way out.
    pub fn from_path(path: &Path) -> Result<Self, FunctionPathError> {
        let metadata = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(FunctionPathError::Missing { path: path.to_owned() });
            }
            metadata => metadata.map_err(unreadable(path))?,
        };
        if metadata.is_dir() { Self::from_folder(path) } else { Self::from_file(path) }
    }

    fn from_folder(path: &Path) -> Result<Self, FunctionPathError> {
        // `.` and `..` have no name of their own.
        let real = path.canonicalize().map_err(unreadable(path))?;
        let name = check_name(real.file_name())?;
        let mut files = Files { root: &real, bytes: 0, found: BTreeMap::new() };
        let settings = read_settings(&real)?;
        for other in &settings.files_of {
            files.add_folder(&real.join(other), "")?;
        }
        files.add_folder(&real, "")?;
        if !files.found.contains_key("handler.py") {
            return Err(FunctionPathError::NoHandler { path: path.to_owned() });
        }
        Ok(Self { name, handler: format!("{MODULE}.handler"), files: files.found, settings })
    }

    fn from_file(path: &Path) -> Result<Self, FunctionPathError> {
        if path.extension().is_none_or(|ending| ending != "py") {
            return Err(FunctionPathError::NotPython { path: path.to_owned() });
        }
        let name = check_name(path.file_stem())?;
        let mut files = Files { root: path, bytes: 0, found: BTreeMap::new() };
        files.add_file(path, format!("{name}.py"))?;
        let settings = FunctionSettings::default();
        Ok(Self { handler: format!("{name}.handler"), name, files: files.found, settings })
    }

    /// The function's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The function to call, as `module.function`.
    #[must_use]
    pub fn handler(&self) -> &str {
        &self.handler
    }

    /// Contents by path inside the function's folder.
    #[must_use]
    pub fn files(&self) -> &BTreeMap<String, Vec<u8>> {
        &self.files
    }

    /// What it requires of its microVM.
    #[must_use]
    pub fn settings(&self) -> &FunctionSettings {
        &self.settings
    }
}

fn read_settings(folder: &Path) -> Result<FunctionSettings, FunctionPathError> {
    let path = folder.join(SETTINGS_FILE);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() => {
            let text = fs::read_to_string(&path).map_err(unreadable(&path))?;
            FunctionSettings::parse(&text)
                .map_err(|source| FunctionPathError::Settings { path, source })
        }
        // Only files can be sent.
        Ok(_) => Ok(FunctionSettings::default()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(FunctionSettings::default()),
        Err(error) => Err(unreadable(&path)(error)),
    }
}

/// Files read so far.
struct Files<'a> {
    root: &'a Path,
    bytes: usize,
    found: BTreeMap<String, Vec<u8>>,
}

impl Files<'_> {
    fn add_folder(&mut self, folder: &Path, prefix: &str) -> Result<(), FunctionPathError> {
        for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
            let entry = entry.map_err(unreadable(folder))?;
            let path = entry.path();
            let Some(name) = entry.file_name().to_str().map(ToOwned::to_owned) else {
                return Err(FunctionPathError::NotPlain { path });
            };
            if name.starts_with('.') || name == "__pycache__" {
                continue;
            }
            let kind = entry.file_type().map_err(unreadable(&path))?;
            if kind.is_dir() {
                self.add_folder(&path, &format!("{prefix}{name}/"))?;
            } else {
                self.add_file(&path, format!("{prefix}{name}"))?;
            }
        }
        Ok(())
    }

    fn add_file(&mut self, path: &Path, name: String) -> Result<(), FunctionPathError> {
        // Symbolic links to files are followed, those to folders are not: they may form a circle.
        // The type is checked before the file is opened: opening a pipe may block forever.
        let metadata = fs::metadata(path).map_err(unreadable(path))?;
        if !metadata.is_file() {
            return Err(FunctionPathError::NotPlain { path: path.to_owned() });
        }
        let too_large = || FunctionPathError::TooLarge { path: self.root.to_owned() };
        let left = MAX_FUNCTION_BYTES - self.bytes;
        if usize::try_from(metadata.len()).map_err(|_| too_large())? > left {
            return Err(too_large());
        }
        let contents = fs::read(path).map_err(unreadable(path))?;
        if contents.len() > left {
            return Err(too_large());
        }
        if self.found.len() == MAX_FUNCTION_FILES {
            return Err(FunctionPathError::TooMany { path: self.root.to_owned() });
        }
        self.bytes += contents.len();
        if let Some(replaced) = self.found.insert(name, contents) {
            self.bytes -= replaced.len();
        }
        Ok(())
    }
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> FunctionPathError {
    let path = path.to_owned();
    |source| FunctionPathError::Unreadable { path, source }
}

fn check_name(name: Option<&std::ffi::OsStr>) -> Result<String, FunctionPathError> {
    let name = name.unwrap_or_default().to_string_lossy().into_owned();
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if (1..=64).contains(&name.len()) && name.bytes().all(fits) {
        Ok(name)
    } else {
        Err(FunctionPathError::Name { name })
    }
}

#[cfg(test)]
#[path = "function_tests.rs"]
mod tests;
