//! The daemon's database: functions, their published versions and aliases, and snapshots to purge.
//!
//! [`open`](Store::open) checks it, and keeps the last good copy. An [`export`] is kept beside it.
//! When the disk fails or is full, the database is opened again; a reserve leaves space for that.

mod answers;
mod attachments;
mod directory;
mod export;
mod file;
mod layers;
mod open;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, RwLock};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use directory::Directory;
use export::{Export, Exported};
use file::OpenFile;

use crate::functions::{Alias, FunctionRecord, LATEST, Version};

type Numbered = (&'static str, u64);
type Named = (&'static str, &'static str);

/// The key is the function's name, the value is JSON.
const FUNCTIONS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("functions");
/// The key is the function's name and the version's number, the value is JSON.
const VERSIONS: TableDefinition<'_, Numbered, &[u8]> = TableDefinition::new("versions");
/// The key is the function's name and the alias's name, the value is JSON.
const ALIASES: TableDefinition<'_, Named, &[u8]> = TableDefinition::new("aliases");

/// Names of snapshots in the pool that the daemon has still to purge. The pool itself does not
/// record which snapshots belong to this daemon.
const TO_PURGE: TableDefinition<'_, &str, ()> = TableDefinition::new("doomed");

/// About the database itself: [`ID`] and [`SEQUENCE`].
const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
/// The database's id, 16 bytes, which the directory's marker has too.
const ID: &str = "id";
/// The count of changes of functions, 8 bytes.
const SEQUENCE: &str = "sequence";

/// The database failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another daemon uses the directory.
    #[error(
        "cannot use {}: another daemon uses it; stop that daemon or name another directory with --data",
        path.display()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// A file or folder of the directory cannot be used.
    #[error("cannot use {} in the daemon's directory", path.display())]
    Directory {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The database cannot be opened.
    #[error("cannot open the database {}", path.display())]
    Open {
        /// Its file.
        path: PathBuf,
        /// The cause.
        source: Box<redb::Error>,
    },
    /// It is damaged.
    #[error(
        "the database {} is damaged: rebuild it from the export beside it with firn serve --recover, or restore it",
        path.display()
    )]
    Damaged {
        /// Its file.
        path: PathBuf,
        /// The cause.
        source: Box<redb::Error>,
    },
    /// It is missing or empty, but there are functions.
    #[error(
        "the database {} is missing or empty, but its directory has functions: rebuild it from the export beside it \
         with firn serve --recover, or restore it",
        path.display()
    )]
    Missing {
        /// Its file.
        path: PathBuf,
    },
    /// It is the database of another directory.
    #[error(
        "the database {} belongs to another directory: restore the right one, or rebuild it from the export beside it \
         with firn serve --recover",
        path.display()
    )]
    Foreign {
        /// Its file.
        path: PathBuf,
    },
    /// It lacks changes that the export has.
    #[error(
        "the database {} lacks the last change of {what}: rebuild it from the export beside it with \
         firn serve --recover, or restore it",
        path.display()
    )]
    Older {
        /// Its file.
        path: PathBuf,
        /// A function or layer whose export is newer.
        what: String,
    },
    /// A function's export cannot be read.
    #[error(
        "cannot read the export {}: restore it, or move it away to recover without that function",
        path.display()
    )]
    Export {
        /// Its file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// There is neither an export nor a copy of the database.
    #[error(
        "cannot recover the database {}: there is neither an export nor a copy of it; restore it, or name another \
         directory with --data",
        path.display()
    )]
    NothingToRecover {
        /// The database's file.
        path: PathBuf,
    },
    /// The disk is full.
    #[error("the disk of the daemon's directory is full: free space, or delete functions")]
    Full(#[source] io::Error),
    /// The database cannot be read or written.
    #[error("cannot read or write the database")]
    Database(#[source] Box<redb::Error>),
    /// An entry of it is not valid for this version of firn.
    #[error("the database holds an entry that this version of firn cannot read")]
    Entry(#[from] serde_json::Error),
}

impl StoreError {
    /// Whether the database can be rebuilt.
    fn is_recoverable(&self) -> bool {
        match self {
            Self::Damaged { .. }
            | Self::Missing { .. }
            | Self::Foreign { .. }
            | Self::Older { .. } => true,
            Self::InUse { .. }
            | Self::Directory { .. }
            | Self::Open { .. }
            | Self::Export { .. }
            | Self::NothingToRecover { .. }
            | Self::Full(_)
            | Self::Database(_)
            | Self::Entry(_) => false,
        }
    }

    /// The error of a copy as that of the database at `path`.
    fn about(self, path: &Path) -> Self {
        match self {
            Self::Damaged { source, .. } => Self::Damaged { path: path.to_owned(), source },
            error => error,
        }
    }
}

/// Converts each of redb's error types.
fn failed(error: impl Into<redb::Error>) -> StoreError {
    StoreError::Database(Box::new(error.into()))
}

/// The open database. Reads do not wait for writes.
#[derive(Debug)]
pub(crate) struct Store {
    /// `None` after a failure of the disk, until it can be opened again.
    open: RwLock<Option<OpenFile>>,
    directory: Directory,
    export: Export,
    /// Functions, and [marks](layers::mark) of layers, whose export is not up to date. Locked while
    /// they are exported.
    stale: Mutex<BTreeSet<String>>,
}

/// A transaction: its changes are committed together or not at all.
pub(crate) struct Change {
    transaction: WriteTransaction,
    /// The changed functions, and marks of layers.
    touched: RefCell<BTreeSet<String>>,
}

impl Store {
    /// Runs `work` in a transaction. The transaction is on disk when this returns `Ok`, and has no
    /// effect when `work` fails.
    pub(crate) fn change<T, E: From<StoreError>>(
        &self,
        work: impl FnOnce(&Change) -> Result<T, E>,
    ) -> Result<T, E> {
        self.directory.reserve().map_err(StoreError::Full)?;
        match self.commit(work) {
            Err(_) if self.is_full() => {
                Err(StoreError::Full(io::ErrorKind::StorageFull.into()).into())
            }
            changed => changed,
        }
    }

    /// The same for work that deletes, or stores little. A full disk does not prevent it.
    pub(crate) fn delete<T, E: From<StoreError>>(
        &self,
        work: impl Fn(&Change) -> Result<T, E>,
    ) -> Result<T, E> {
        let deleted = match self.commit(&work) {
            Err(_) if self.is_full() => {
                self.reopen()?;
                self.directory.release();
                self.commit(&work)
            }
            deleted => deleted,
        };
        // Fails while the disk is full.
        let _ = self.directory.reserve();
        deleted
    }

    fn commit<T, E: From<StoreError>>(
        &self,
        work: impl FnOnce(&Change) -> Result<T, E>,
    ) -> Result<T, E> {
        let (done, touched) = self.with(|database| {
            let change = Change::begin(database)?;
            let done = work(&change)?;
            Ok::<_, E>((done, change.end()?))
        })?;
        if !touched.is_empty() {
            self.stale.lock().extend(touched);
            self.export_stale();
        }
        Ok(done)
    }

    /// Gives `work` the database, which is opened again if the disk has failed.
    fn with<T, E: From<StoreError>>(
        &self,
        work: impl FnOnce(&Database) -> Result<T, E>,
    ) -> Result<T, E> {
        loop {
            let open = self.open.read();
            if let Some(file) = open.as_ref().filter(|file| file.failure().is_none()) {
                return work(&file.database);
            }
            drop(open);
            self.reopen()?;
        }
    }

    /// Whether the disk was full.
    fn is_full(&self) -> bool {
        let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
        let open = self.open.read();
        open.as_ref().and_then(OpenFile::failure).is_some_and(|kind| full.contains(&kind))
    }

    /// Exports the functions that have changed. A function whose export fails is exported again
    /// with the next change.
    fn export_stale(&self) {
        let mut stale = self.stale.lock();
        stale.retain(|name| match self.export(name) {
            Ok(()) => false,
            Err(error) => {
                let error: &(dyn std::error::Error + 'static) = &error;
                tracing::warn!(error, function = name, "cannot export a function");
                true
            }
        });
    }

    fn export(&self, name: &str) -> Result<(), StoreError> {
        if let Some(layer) = layers::marked(name) {
            return self.export_layer(layer);
        }
        let current = self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            let found = get(&read.open_table(FUNCTIONS).map_err(failed)?, name)?;
            let Some(function) = found else { return Ok(None) };
            let versions = versions(&read.open_table(VERSIONS).map_err(failed)?, name)?;
            let aliases = named(&read.open_table(ALIASES).map_err(failed)?, name)?;
            let attachments = attachments::all(&read, name)?;
            let sequence = sequence(&read.open_table(META).map_err(failed)?)?;
            let exported = Exported::new(sequence, function, versions, aliases, attachments);
            Ok::<_, StoreError>(Some(exported))
        })?;
        let written = match current {
            None => self.export.remove(name),
            Some(current) => match self.export.read(name) {
                Ok(last) if last.is_same(&current) => Ok(()),
                _ => self.export.write(name, &current),
            },
        };
        written.map_err(|source| StoreError::Directory { path: self.export.path(name), source })
    }

    pub(crate) fn function(&self, name: &str) -> Result<Option<FunctionRecord>, StoreError> {
        self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            get(&read.open_table(FUNCTIONS).map_err(failed)?, name)
        })
    }

    /// All functions, sorted by name.
    pub(crate) fn functions(&self) -> Result<Vec<FunctionRecord>, StoreError> {
        self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            let table = read.open_table(FUNCTIONS).map_err(failed)?;
            let entries = table.iter().map_err(failed)?;
            entries.map(|entry| parse(entry.map_err(failed)?.1.value())).collect()
        })
    }

    /// `$LATEST` or a published version.
    pub(crate) fn version(&self, name: &str, version: &str) -> Result<Option<Version>, StoreError> {
        if version == LATEST {
            return Ok(self.function(name)?.map(|function| function.latest));
        }
        let Ok(number) = version.parse() else { return Ok(None) };
        self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            get(&read.open_table(VERSIONS).map_err(failed)?, (name, number))
        })
    }

    /// The published versions of a function, oldest first.
    pub(crate) fn versions(&self, name: &str) -> Result<Vec<Version>, StoreError> {
        self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            versions(&read.open_table(VERSIONS).map_err(failed)?, name)
        })
    }

    /// Names of snapshots in the pool that the daemon has still to purge.
    pub(crate) fn to_purge(&self) -> Result<Vec<String>, StoreError> {
        self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            let table = read.open_table(TO_PURGE).map_err(failed)?;
            let entries = table.iter().map_err(failed)?;
            entries.map(|entry| Ok(entry.map_err(failed)?.0.value().to_owned())).collect()
        })
    }

    pub(crate) fn alias(&self, name: &str, alias: &str) -> Result<Option<Alias>, StoreError> {
        self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            get(&read.open_table(ALIASES).map_err(failed)?, (name, alias))
        })
    }

    /// The aliases of a function, sorted by name.
    pub(crate) fn aliases(&self, name: &str) -> Result<Vec<(String, Alias)>, StoreError> {
        self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            named(&read.open_table(ALIASES).map_err(failed)?, name)
        })
    }
}

impl Change {
    fn begin(database: &Database) -> Result<Self, StoreError> {
        let transaction = database.begin_write().map_err(failed)?;
        Ok(Self { transaction, touched: RefCell::default() })
    }

    /// Commits. Returns the changed functions.
    fn end(self) -> Result<BTreeSet<String>, StoreError> {
        if !self.touched.borrow().is_empty() {
            let last = sequence(&self.transaction.open_table(META).map_err(failed)?)?;
            self.set_sequence(last + 1)?;
        }
        self.transaction.commit().map_err(failed)?;
        Ok(self.touched.into_inner())
    }

    /// A reader cannot open a table that no writer has opened.
    fn make_tables(&self) -> Result<(), StoreError> {
        self.transaction.open_table(FUNCTIONS).map_err(failed)?;
        self.transaction.open_table(VERSIONS).map_err(failed)?;
        self.transaction.open_table(ALIASES).map_err(failed)?;
        self.transaction.open_table(TO_PURGE).map_err(failed)?;
        self.transaction.open_table(META).map_err(failed)?;
        self.transaction.open_table(answers::ANSWERS).map_err(failed)?;
        Ok(())
    }

    fn identify(&self, id: Uuid) -> Result<(), StoreError> {
        let mut meta = self.transaction.open_table(META).map_err(failed)?;
        meta.insert(ID, id.as_bytes().as_slice()).map_err(failed)?;
        Ok(())
    }

    fn set_sequence(&self, sequence: u64) -> Result<(), StoreError> {
        let mut meta = self.transaction.open_table(META).map_err(failed)?;
        meta.insert(SEQUENCE, sequence.to_le_bytes().as_slice()).map_err(failed)?;
        Ok(())
    }

    fn touch(&self, function: &str) {
        self.touched.borrow_mut().insert(function.to_owned());
    }

    pub(crate) fn function(&self, name: &str) -> Result<Option<FunctionRecord>, StoreError> {
        get(&self.transaction.open_table(FUNCTIONS).map_err(failed)?, name)
    }

    /// All functions, sorted by name.
    pub(crate) fn functions(&self) -> Result<Vec<FunctionRecord>, StoreError> {
        let table = self.transaction.open_table(FUNCTIONS).map_err(failed)?;
        let entries = table.iter().map_err(failed)?;
        entries.map(|entry| parse(entry.map_err(failed)?.1.value())).collect()
    }

    pub(crate) fn put_function(
        &self,
        name: &str,
        function: &FunctionRecord,
    ) -> Result<(), StoreError> {
        self.touch(name);
        put(self.transaction.open_table(FUNCTIONS).map_err(failed)?, name, function)
    }

    pub(crate) fn version(&self, name: &str, number: u64) -> Result<Option<Version>, StoreError> {
        get(&self.transaction.open_table(VERSIONS).map_err(failed)?, (name, number))
    }

    pub(crate) fn put_version(
        &self,
        name: &str,
        number: u64,
        version: &Version,
    ) -> Result<(), StoreError> {
        self.touch(name);
        put(self.transaction.open_table(VERSIONS).map_err(failed)?, (name, number), version)
    }

    /// The published versions of a function, oldest first.
    pub(crate) fn versions(&self, name: &str) -> Result<Vec<Version>, StoreError> {
        versions(&self.transaction.open_table(VERSIONS).map_err(failed)?, name)
    }

    /// Records that the daemon has to purge a snapshot from the pool.
    pub(crate) fn purge(&self, snapshot: &str) -> Result<(), StoreError> {
        self.transaction
            .open_table(TO_PURGE)
            .map_err(failed)?
            .insert(snapshot, ())
            .map_err(failed)?;
        Ok(())
    }

    /// Records that a snapshot was purged from the pool.
    pub(crate) fn purged(&self, snapshot: &str) -> Result<(), StoreError> {
        self.transaction.open_table(TO_PURGE).map_err(failed)?.remove(snapshot).map_err(failed)?;
        Ok(())
    }

    /// Removes a published version. Returns whether it existed.
    pub(crate) fn remove_version(&self, name: &str, number: u64) -> Result<bool, StoreError> {
        self.touch(name);
        let mut table = self.transaction.open_table(VERSIONS).map_err(failed)?;
        let removed = table.remove((name, number)).map_err(failed)?.is_some();
        Ok(removed)
    }

    pub(crate) fn alias(&self, name: &str, alias: &str) -> Result<Option<Alias>, StoreError> {
        get(&self.transaction.open_table(ALIASES).map_err(failed)?, (name, alias))
    }

    pub(crate) fn aliases(&self, name: &str) -> Result<Vec<(String, Alias)>, StoreError> {
        named(&self.transaction.open_table(ALIASES).map_err(failed)?, name)
    }

    pub(crate) fn put_alias(
        &self,
        name: &str,
        alias: &str,
        value: &Alias,
    ) -> Result<(), StoreError> {
        self.touch(name);
        put(self.transaction.open_table(ALIASES).map_err(failed)?, (name, alias), value)
    }

    /// Removes an alias, if it exists.
    pub(crate) fn remove_alias(&self, name: &str, alias: &str) -> Result<(), StoreError> {
        self.touch(name);
        let mut table = self.transaction.open_table(ALIASES).map_err(failed)?;
        table.remove((name, alias)).map_err(failed)?;
        Ok(())
    }

    /// Removes a function with its versions, aliases and attachments. Returns whether it existed.
    pub(crate) fn remove_function(&self, name: &str) -> Result<bool, StoreError> {
        self.touch(name);
        let mut functions = self.transaction.open_table(FUNCTIONS).map_err(failed)?;
        let removed = functions.remove(name).map_err(failed)?.is_some();
        let mut versions = self.transaction.open_table(VERSIONS).map_err(failed)?;
        versions.retain_in((name, 0)..=(name, u64::MAX), |_, _| false).map_err(failed)?;
        for (alias, _) in self.aliases(name)? {
            self.remove_alias(name, &alias)?;
        }
        self.remove_all_attachments(name)?;
        Ok(removed)
    }
}

fn sequence(meta: &impl ReadableTable<&'static str, &'static [u8]>) -> Result<u64, StoreError> {
    let bytes = meta.get(SEQUENCE).map_err(failed)?;
    let bytes = bytes.and_then(|bytes| bytes.value().try_into().ok());
    Ok(bytes.map_or(0, u64::from_le_bytes))
}

fn versions(
    table: &impl ReadableTable<Numbered, &'static [u8]>,
    name: &str,
) -> Result<Vec<Version>, StoreError> {
    let entries = table.range((name, 0)..=(name, u64::MAX)).map_err(failed)?;
    entries.map(|entry| parse(entry.map_err(failed)?.1.value())).collect()
}

/// The entries of a function, by the second part of their keys.
fn named<T: DeserializeOwned>(
    table: &impl ReadableTable<Named, &'static [u8]>,
    name: &str,
) -> Result<Vec<(String, T)>, StoreError> {
    let mut found = Vec::new();
    for entry in table.range((name, "")..).map_err(failed)? {
        let (key, value) = entry.map_err(failed)?;
        let (function, second) = key.value();
        if function != name {
            break;
        }
        found.push((second.to_owned(), parse(value.value())?));
    }
    Ok(found)
}

fn get<'k, K: redb::Key + 'static, T: DeserializeOwned>(
    table: &impl ReadableTable<K, &'static [u8]>,
    key: impl std::borrow::Borrow<K::SelfType<'k>>,
) -> Result<Option<T>, StoreError> {
    let found = table.get(key).map_err(failed)?;
    found.map(|value| parse(value.value())).transpose()
}

fn put<'k, K: redb::Key + 'static>(
    mut table: redb::Table<'_, K, &'static [u8]>,
    key: impl std::borrow::Borrow<K::SelfType<'k>>,
    value: &impl Serialize,
) -> Result<(), StoreError> {
    let json = serde_json::to_vec(value)?;
    table.insert(key, json.as_slice()).map_err(failed)?;
    Ok(())
}

fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, StoreError> {
    Ok(serde_json::from_slice(json)?)
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod attack_tests;
