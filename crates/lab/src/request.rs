//! The lab's inputs and results, as tar archives.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

const REQUEST: &str = "request.json";

/// A request to the lab's init.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    /// The command and its arguments.
    pub(crate) command: Vec<String>,
    /// Variables added to the command's environment.
    pub(crate) environment: Vec<(String, String)>,
    /// Whether the init sends `/out` back.
    pub(crate) results: bool,
}

/// The inputs cannot be packed.
#[derive(Debug, Error)]
pub enum PackError {
    /// An input cannot be read.
    #[error("cannot pass {path} into the lab: check that it exists and is readable")]
    Input {
        /// The input.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Two inputs have the same name.
    #[error(
        "two inputs have the name {name}, and both would be /in/{name} in the lab; rename one, or pass a folder that contains both"
    )]
    SameName {
        /// The name.
        name: String,
    },
    /// The temporary archive cannot be written.
    #[error("cannot write the archive of the lab's inputs")]
    Write(#[source] io::Error),
}

/// Writes the request and the inputs into `archive`, and rewinds it.
pub(crate) fn pack(
    archive: &mut File,
    request: &Request,
    inputs: &[PathBuf],
) -> Result<(), PackError> {
    let mut builder = tar::Builder::new(BufWriter::new(&mut *archive));
    let json = serde_json::to_vec(request).map_err(|error| PackError::Write(error.into()))?;
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(
        json.len().try_into().map_err(|error| PackError::Write(io::Error::other(error)))?,
    );
    builder.append_data(&mut header, REQUEST, json.as_slice()).map_err(PackError::Write)?;

    builder.follow_symlinks(false);
    let mut names = BTreeSet::new();
    for path in inputs {
        let failed = |source| PackError::Input { path: path.clone(), source };
        // A symbolic link is replaced by its target, under the link's name.
        let real = fs::canonicalize(path).map_err(failed)?;
        let Some(name) =
            path.file_name().or(real.file_name()).map(|name| name.to_string_lossy().into_owned())
        else {
            return Err(failed(io::Error::from(io::ErrorKind::InvalidFilename)));
        };
        let inside = Path::new("in").join(&name);
        let packed = match real.is_dir() {
            true => builder.append_dir_all(&inside, &real),
            false => builder.append_path_with_name(&real, &inside),
        };
        packed.map_err(failed)?;
        if !names.insert(name.clone()) {
            return Err(PackError::SameName { name });
        }
    }
    builder.into_inner().and_then(|mut buffer| buffer.flush()).map_err(PackError::Write)?;
    archive.rewind().map_err(PackError::Write)
}

/// Reads the request from `archive` and unpacks the inputs to `in` below `root`.
pub(crate) fn unpack(archive: impl Read, root: &Path) -> io::Result<Request> {
    let mut archive = tar::Archive::new(BufReader::with_capacity(1 << 20, archive));
    archive.set_preserve_permissions(true);
    let mut request = None;
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.path()?.as_os_str() == REQUEST {
            request = Some(serde_json::from_reader(&mut entry)?);
        } else {
            entry.unpack_in(root)?;
        }
    }
    request.ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "the archive contains no request")
    })
}

/// Writes the contents of `folder` as a tar archive.
pub(crate) fn pack_results(folder: &Path, archive: impl Write) -> io::Result<()> {
    let mut builder =
        tar::Builder::new(BufWriter::with_capacity(crate::channel::MAX_CONTENT, archive));
    builder.follow_symlinks(false);
    builder.append_dir_all("", folder)?;
    builder.into_inner()?.flush()
}

/// Unpacks the archive of results into `folder`. Entries outside `folder` are skipped.
pub(crate) fn unpack_results(archive: &mut File, folder: &Path) -> io::Result<()> {
    archive.rewind()?;
    let mut archive = tar::Archive::new(BufReader::new(archive));
    archive.set_preserve_permissions(true);
    archive.unpack(folder)
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
