//! The export: beside the database, a file for each function and each layer, from which
//! `firn serve --recover` rebuilds a database that is lost or damaged.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::StoreError;
use super::directory::create_private;
use super::layers::{mark, marked};
use crate::functions::{Alias, Attachments, FunctionRecord, Layer, Target, Version};

/// The version of the files' format.
const FORMAT: u32 = 1;

/// Everything that the database has about one function.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Exported {
    format: u32,
    /// The database's count of changes when this was written.
    pub(super) sequence: u64,
    pub(super) function: FunctionRecord,
    pub(super) versions: Vec<Version>,
    pub(super) aliases: Vec<(String, Alias)>,
    #[serde(default)]
    pub(super) attachments: Vec<(String, Attachments)>,
}

/// A layer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ExportedLayer {
    format: u32,
    /// The database's count of changes when this was written.
    pub(super) sequence: u64,
    pub(super) name: String,
    pub(super) layer: Layer,
}

impl ExportedLayer {
    pub(super) fn new(sequence: u64, name: &str, layer: Layer) -> Self {
        Self { format: FORMAT, sequence, name: name.to_owned(), layer }
    }
}

/// The folder with the export.
#[derive(Debug)]
pub(super) struct Export {
    folder: PathBuf,
}

impl Exported {
    pub(super) fn new(
        sequence: u64,
        function: FunctionRecord,
        versions: Vec<Version>,
        aliases: Vec<(String, Alias)>,
        attachments: Vec<(String, Attachments)>,
    ) -> Self {
        Self { format: FORMAT, sequence, function, versions, aliases, attachments }
    }

    /// Whether both have the same function.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let text = |one: &Self| {
            let all = (&one.function, &one.versions, &one.aliases, &one.attachments);
            serde_json::to_value(all).unwrap_or_default()
        };
        text(self) == text(other)
    }
}

impl Export {
    /// Opens the export in `folder`, which it creates where needed.
    pub(super) fn open(folder: PathBuf) -> Result<Self, StoreError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|source| StoreError::Directory { path: folder.clone(), source })?;
        Ok(Self { folder })
    }

    /// The names of the exported functions.
    pub(super) fn names(&self) -> Result<BTreeSet<String>, StoreError> {
        self.find(|name| Target::new(name, None).ok().map(|_| name))
    }

    /// The names of the exported layers.
    pub(super) fn layers(&self) -> Result<BTreeSet<String>, StoreError> {
        self.find(|name| marked(name).filter(|name| !name.contains('.')))
    }

    /// The names that `own` finds in those of the files.
    fn find(&self, own: impl Fn(&str) -> Option<&str>) -> Result<BTreeSet<String>, StoreError> {
        let failed = |source| StoreError::Directory { path: self.folder.clone(), source };
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(&self.folder).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let name = name.to_str().and_then(|name| name.strip_suffix(".json"));
            names.extend(name.and_then(&own).map(ToOwned::to_owned));
        }
        Ok(names)
    }

    /// Reads one function.
    pub(super) fn read(&self, name: &str) -> Result<Exported, StoreError> {
        self.parse(name, |exported: &Exported| {
            exported.format == FORMAT && exported.function.latest.function == name
        })
    }

    /// Reads one layer.
    pub(super) fn read_layer(&self, name: &str) -> Result<ExportedLayer, StoreError> {
        self.parse(&mark(name), |exported: &ExportedLayer| {
            exported.format == FORMAT && exported.name == name
        })
    }

    fn parse<T: DeserializeOwned>(
        &self,
        file: &str,
        is_own: impl FnOnce(&T) -> bool,
    ) -> Result<T, StoreError> {
        let path = self.path(file);
        let text = fs::read_to_string(&path);
        let text = text.map_err(|source| StoreError::Export { path: path.clone(), source })?;
        let damaged = |reason: &str| StoreError::Export {
            path: path.clone(),
            source: io::Error::new(io::ErrorKind::InvalidData, reason),
        };
        let (digest, json) = text.split_once('\n').unwrap_or_default();
        if digest != digest_of(json) {
            return Err(damaged("its digest is not that of its content"));
        }
        let exported = serde_json::from_str(json).map_err(|error| damaged(&error.to_string()))?;
        if !is_own(&exported) {
            return Err(damaged("another version of firn, or another function, has written it"));
        }
        Ok(exported)
    }

    /// Writes one function, or one layer by its mark, in one step.
    pub(super) fn write(&self, name: &str, exported: &impl Serialize) -> io::Result<()> {
        let json = serde_json::to_string(exported)?;
        let path = self.path(name);
        // Not the name of an export, which ends in .json.
        let partial = path.with_extension("json.new");
        let mut file = create_private(&partial)?;
        write!(file, "{}\n{json}", digest_of(&json))?;
        file.sync_all()?;
        fs::rename(partial, path)?;
        self.sync()
    }

    /// Removes a function, or a layer by its mark, if it is there.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.path(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(()) => self.sync(),
        }
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.folder)?.sync_all()
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.json"))
    }
}

fn digest_of(json: &str) -> String {
    Sha256::digest(json).iter().map(|byte| format!("{byte:02x}")).collect()
}
