//! The option `--metadata`: a guest's metadata service.

use std::fs::File;
use std::io::{self, Read};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;

use firn_net::{MetadataConfig, MetadataStore, MetadataVersion, PutMetadataError};
use firn_run::MetadataSpec;
use thiserror::Error;

/// The largest file that is read, bytes: spaces do not count in the limit of a document.
const MAX_FILE: u64 = 1 << 20;

/// A document and how the guest reaches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MetadataArg {
    file: PathBuf,
    config: MetadataConfig,
}

/// The option is not valid.
#[derive(Debug, Error)]
pub(crate) enum MetadataArgError {
    #[error("there is no file: use --metadata FILE, with ,KEY=VALUE for each option")]
    NoFile,
    #[error("{0:?} is not an option of --metadata: use version=1, version=2 or address=ADDRESS")]
    Key(String),
    #[error("{0} is given twice")]
    Twice(String),
    #[error("{0:?} is not a version of the metadata service: use 1, or 2 for tokens")]
    Version(String),
    #[error("{0:?} is not an address for metadata: use one from 169.254.1.0 to 169.254.254.255")]
    Address(String),
}

/// The document cannot be used.
#[derive(Debug, Error)]
pub(crate) enum ReadMetadataError {
    #[error("cannot read the metadata in {path}", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the metadata in {path} is larger than {MAX_FILE} bytes", path = path.display())]
    TooLarge { path: PathBuf },
    #[error("the metadata in {path} is not JSON", path = path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("the metadata in {path} is not a JSON object", path = path.display())]
    NotObject { path: PathBuf },
    #[error("the metadata in {path} cannot be stored", path = path.display())]
    Put { path: PathBuf, source: PutMetadataError },
}

impl FromStr for MetadataArg {
    type Err = MetadataArgError;

    fn from_str(text: &str) -> Result<Self, MetadataArgError> {
        let mut parts = text.split(',');
        let file = parts.next().filter(|file| !file.is_empty()).ok_or(MetadataArgError::NoFile)?;
        let mut config = MetadataConfig::default();
        let mut seen = Vec::new();
        for part in parts {
            let (key, value) =
                part.split_once('=').ok_or_else(|| MetadataArgError::Key(part.to_owned()))?;
            if seen.contains(&key) {
                return Err(MetadataArgError::Twice(key.to_owned()));
            }
            match key {
                "version" => config.version = parse_version(value)?,
                "address" => config.address = parse_address(value)?,
                _ => return Err(MetadataArgError::Key(part.to_owned())),
            }
            seen.push(key);
        }
        Ok(Self { file: file.into(), config })
    }
}

fn parse_version(text: &str) -> Result<MetadataVersion, MetadataArgError> {
    match text {
        "1" => Ok(MetadataVersion::V1),
        "2" => Ok(MetadataVersion::V2),
        _ => Err(MetadataArgError::Version(text.to_owned())),
    }
}

fn parse_address(text: &str) -> Result<Ipv4Addr, MetadataArgError> {
    let address = text.parse().ok().filter(|address| MetadataConfig::is_valid_address(*address));
    address.ok_or_else(|| MetadataArgError::Address(text.to_owned()))
}

impl MetadataArg {
    /// Reads the document.
    pub(crate) fn read(&self) -> Result<MetadataSpec, ReadMetadataError> {
        let path = || self.file.clone();
        let failed = |source| ReadMetadataError::Read { path: path(), source };
        let mut bytes = Vec::new();
        let file = File::open(&self.file).map_err(failed)?;
        file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(failed)?;
        if u64::try_from(bytes.len()).is_ok_and(|len| len > MAX_FILE) {
            return Err(ReadMetadataError::TooLarge { path: path() });
        }
        let document: serde_json::Value = serde_json::from_slice(&bytes)
            .map_err(|source| ReadMetadataError::Json { path: path(), source })?;
        if !document.is_object() {
            return Err(ReadMetadataError::NotObject { path: path() });
        }
        // The monitor has a store of its own with the same limit.
        MetadataStore::default()
            .put(document.clone())
            .map_err(|source| ReadMetadataError::Put { path: path(), source })?;
        Ok(MetadataSpec { config: self.config, document })
    }
}

#[cfg(test)]
#[path = "metadata_arg_tests.rs"]
mod tests;
