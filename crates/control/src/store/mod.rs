//! The daemon's database: functions, their published versions and aliases, and snapshots to purge.

use std::path::{Path, PathBuf};

use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

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

/// The database failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another daemon has it open.
    #[error(
        "cannot open the database {}: another daemon uses it; stop that daemon or name another directory with --data",
        path.display()
    )]
    InUse {
        /// Its file.
        path: PathBuf,
    },
    /// It cannot be opened.
    #[error("cannot open the database {}", path.display())]
    Open {
        /// Its file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: redb::Error,
    },
    /// It cannot be read or written.
    #[error("cannot read or write the database")]
    Database(#[source] redb::Error),
    /// An entry of it is not valid for this version of firn.
    #[error("the database holds an entry that this version of firn cannot read")]
    Entry(#[from] serde_json::Error),
}

/// Converts each of redb's error types.
fn failed(error: impl Into<redb::Error>) -> StoreError {
    StoreError::Database(error.into())
}

/// The open database. Reads do not wait for writes.
#[derive(Debug)]
pub(crate) struct Store {
    database: Database,
}

/// A transaction: its changes are committed together or not at all.
pub(crate) struct Change(WriteTransaction);

impl Store {
    /// Opens the database at `path`, which it creates where needed.
    pub(crate) fn open(path: &Path) -> Result<Self, StoreError> {
        let opened = Database::create(path).map_err(|source| match source {
            DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { path: path.to_owned() },
            source => StoreError::Open { path: path.to_owned(), source: source.into() },
        })?;
        let store = Self { database: opened };
        // A reader cannot open a table that no writer has opened.
        store.change(|change| {
            change.0.open_table(FUNCTIONS).map_err(failed)?;
            change.0.open_table(VERSIONS).map_err(failed)?;
            change.0.open_table(ALIASES).map_err(failed)?;
            change.0.open_table(TO_PURGE).map_err(failed)?;
            Ok::<_, StoreError>(())
        })?;
        Ok(store)
    }

    /// Runs `work` in a transaction. The transaction is on disk when this returns `Ok`, and has no
    /// effect when `work` fails.
    pub(crate) fn change<T, E: From<StoreError>>(
        &self,
        work: impl FnOnce(&Change) -> Result<T, E>,
    ) -> Result<T, E> {
        let change = Change(self.database.begin_write().map_err(failed)?);
        let done = work(&change)?;
        change.0.commit().map_err(failed)?;
        Ok(done)
    }

    pub(crate) fn function(&self, name: &str) -> Result<Option<FunctionRecord>, StoreError> {
        let read = self.database.begin_read().map_err(failed)?;
        get(&read.open_table(FUNCTIONS).map_err(failed)?, name)
    }

    /// All functions, sorted by name.
    pub(crate) fn functions(&self) -> Result<Vec<FunctionRecord>, StoreError> {
        let read = self.database.begin_read().map_err(failed)?;
        let table = read.open_table(FUNCTIONS).map_err(failed)?;
        let entries = table.iter().map_err(failed)?;
        entries.map(|entry| parse(entry.map_err(failed)?.1.value())).collect()
    }

    /// `$LATEST` or a published version.
    pub(crate) fn version(&self, name: &str, version: &str) -> Result<Option<Version>, StoreError> {
        if version == LATEST {
            return Ok(self.function(name)?.map(|function| function.latest));
        }
        let Ok(number) = version.parse() else { return Ok(None) };
        let read = self.database.begin_read().map_err(failed)?;
        get(&read.open_table(VERSIONS).map_err(failed)?, (name, number))
    }

    /// The published versions of a function, oldest first.
    pub(crate) fn versions(&self, name: &str) -> Result<Vec<Version>, StoreError> {
        let read = self.database.begin_read().map_err(failed)?;
        let table = read.open_table(VERSIONS).map_err(failed)?;
        let entries = table.range((name, 0)..=(name, u64::MAX)).map_err(failed)?;
        entries.map(|entry| parse(entry.map_err(failed)?.1.value())).collect()
    }

    /// Names of snapshots in the pool that the daemon has still to purge.
    pub(crate) fn to_purge(&self) -> Result<Vec<String>, StoreError> {
        let read = self.database.begin_read().map_err(failed)?;
        let table = read.open_table(TO_PURGE).map_err(failed)?;
        let entries = table.iter().map_err(failed)?;
        entries.map(|entry| Ok(entry.map_err(failed)?.0.value().to_owned())).collect()
    }

    pub(crate) fn alias(&self, name: &str, alias: &str) -> Result<Option<Alias>, StoreError> {
        let read = self.database.begin_read().map_err(failed)?;
        get(&read.open_table(ALIASES).map_err(failed)?, (name, alias))
    }

    /// The aliases of a function, sorted by name.
    pub(crate) fn aliases(&self, name: &str) -> Result<Vec<(String, Alias)>, StoreError> {
        let read = self.database.begin_read().map_err(failed)?;
        aliases(&read.open_table(ALIASES).map_err(failed)?, name)
    }
}

impl Change {
    pub(crate) fn function(&self, name: &str) -> Result<Option<FunctionRecord>, StoreError> {
        get(&self.0.open_table(FUNCTIONS).map_err(failed)?, name)
    }

    pub(crate) fn put_function(
        &self,
        name: &str,
        function: &FunctionRecord,
    ) -> Result<(), StoreError> {
        put(self.0.open_table(FUNCTIONS).map_err(failed)?, name, function)
    }

    pub(crate) fn version(&self, name: &str, number: u64) -> Result<Option<Version>, StoreError> {
        get(&self.0.open_table(VERSIONS).map_err(failed)?, (name, number))
    }

    pub(crate) fn put_version(
        &self,
        name: &str,
        number: u64,
        version: &Version,
    ) -> Result<(), StoreError> {
        put(self.0.open_table(VERSIONS).map_err(failed)?, (name, number), version)
    }

    /// The published versions of a function, oldest first.
    pub(crate) fn versions(&self, name: &str) -> Result<Vec<Version>, StoreError> {
        let table = self.0.open_table(VERSIONS).map_err(failed)?;
        let entries = table.range((name, 0)..=(name, u64::MAX)).map_err(failed)?;
        entries.map(|entry| parse(entry.map_err(failed)?.1.value())).collect()
    }

    /// Records that the daemon has to purge a snapshot from the pool.
    pub(crate) fn purge(&self, snapshot: &str) -> Result<(), StoreError> {
        self.0.open_table(TO_PURGE).map_err(failed)?.insert(snapshot, ()).map_err(failed)?;
        Ok(())
    }

    /// Records that a snapshot was purged from the pool.
    pub(crate) fn purged(&self, snapshot: &str) -> Result<(), StoreError> {
        self.0.open_table(TO_PURGE).map_err(failed)?.remove(snapshot).map_err(failed)?;
        Ok(())
    }

    /// Removes a published version. Returns whether it existed.
    pub(crate) fn remove_version(&self, name: &str, number: u64) -> Result<bool, StoreError> {
        let mut table = self.0.open_table(VERSIONS).map_err(failed)?;
        let removed = table.remove((name, number)).map_err(failed)?.is_some();
        Ok(removed)
    }

    pub(crate) fn alias(&self, name: &str, alias: &str) -> Result<Option<Alias>, StoreError> {
        get(&self.0.open_table(ALIASES).map_err(failed)?, (name, alias))
    }

    pub(crate) fn aliases(&self, name: &str) -> Result<Vec<(String, Alias)>, StoreError> {
        aliases(&self.0.open_table(ALIASES).map_err(failed)?, name)
    }

    pub(crate) fn put_alias(
        &self,
        name: &str,
        alias: &str,
        value: &Alias,
    ) -> Result<(), StoreError> {
        put(self.0.open_table(ALIASES).map_err(failed)?, (name, alias), value)
    }

    /// Removes an alias, if it exists.
    pub(crate) fn remove_alias(&self, name: &str, alias: &str) -> Result<(), StoreError> {
        let mut table = self.0.open_table(ALIASES).map_err(failed)?;
        table.remove((name, alias)).map_err(failed)?;
        Ok(())
    }

    /// Removes a function with its versions and aliases. Returns whether it existed.
    pub(crate) fn remove_function(&self, name: &str) -> Result<bool, StoreError> {
        let mut functions = self.0.open_table(FUNCTIONS).map_err(failed)?;
        let removed = functions.remove(name).map_err(failed)?.is_some();
        let mut versions = self.0.open_table(VERSIONS).map_err(failed)?;
        versions.retain_in((name, 0)..=(name, u64::MAX), |_, _| false).map_err(failed)?;
        for (alias, _) in self.aliases(name)? {
            self.remove_alias(name, &alias)?;
        }
        Ok(removed)
    }
}

fn aliases(
    table: &impl ReadableTable<Named, &'static [u8]>,
    name: &str,
) -> Result<Vec<(String, Alias)>, StoreError> {
    let mut found = Vec::new();
    for entry in table.range((name, "")..).map_err(failed)? {
        let (key, value) = entry.map_err(failed)?;
        let (function, alias) = key.value();
        if function != name {
            break;
        }
        found.push((alias.to_owned(), parse(value.value())?));
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
