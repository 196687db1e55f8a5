//! Opens the database: checks it before the daemon listens, keeps the last good copy, and rebuilds
//! a lost or damaged database from the export.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, RwLock};
use redb::{ReadableDatabase, ReadableTable, TableError};
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::attachments::ATTACHMENTS;
use super::directory::{Directory, create_private};
use super::export::{Export, Exported, ExportedLayer};
use super::file::OpenFile;
use super::layers::{LAYERS, mark};
use super::{
    ALIASES, Change, FUNCTIONS, ID, META, Store, StoreError, VERSIONS, failed, parse, sequence,
};
use crate::functions::{
    Alias, Attachments, FunctionRecord, Layer, Version, is_code_file, is_snapshot_name,
};

/// The database.
const STATE: &str = "state.redb";
/// The database as it was at the last start.
const GOOD: &str = "state.redb.good";
/// A copy that is being checked.
const COPY: &str = "state.redb.copy";
/// A database that is being made.
const NEW: &str = "state.redb.new";
/// The folder with the export.
const EXPORT: &str = "functions";

/// What identifies a database. Databases of earlier versions have neither.
#[derive(Debug, Clone, Copy, Default)]
struct Identity {
    id: Option<Uuid>,
    sequence: u64,
}

impl Store {
    /// Opens the database in the directory `data`. Creates both if the directory has never had
    /// functions. With `recover`, rebuilds a lost or damaged database from its export.
    pub(crate) fn open(data: &Path, recover: bool) -> Result<Self, StoreError> {
        let directory = Directory::open(data)?;
        // The start may need space: it has to succeed on a full disk.
        directory.release();
        let export = Export::open(directory.file(EXPORT))?;
        match check(&directory, &export) {
            Ok(()) if recover => tracing::info!("the database is valid: nothing to recover"),
            Err(error) if recover && error.is_recoverable() => rebuild(&directory, &export)?,
            checked => checked?,
        }
        let path = directory.file(STATE);
        let file = OpenFile::open(&path)?;
        let found = check_identity(&file, &path, &directory, &export)?;
        let store =
            Self { open: RwLock::new(Some(file)), directory, export, stale: Mutex::default() };
        if found.id.is_none() {
            // An earlier version has made it.
            let id = store.directory.id()?.unwrap_or_else(Uuid::new_v4);
            store.commit(|change| {
                change.make_tables()?;
                change.identify(id)
            })?;
            store.directory.mark(id)?;
        }
        store.export_all()?;
        if let Err(error) = store.directory.reserve() {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "no space for the reserve: functions can only be deleted");
        }
        Ok(store)
    }

    /// Opens the database again after the disk has failed.
    pub(super) fn reopen(&self) -> Result<(), StoreError> {
        let mut open = self.open.write();
        if open.as_ref().is_some_and(|file| file.failure().is_none()) {
            return Ok(());
        }
        // The file is closed first.
        *open = None;
        self.directory.release();
        *open = Some(OpenFile::open(&self.directory.file(STATE))?);
        tracing::warn!("opened the database again after the disk failed");
        // Fails while the disk is full; then changes fail, except those that delete.
        let _ = self.directory.reserve();
        Ok(())
    }

    /// Brings the export up to date with the database.
    fn export_all(&self) -> Result<(), StoreError> {
        let mut names = self.export.names()?;
        names.extend(self.functions()?.into_iter().map(|function| function.latest.function));
        names.extend(self.export.layers()?.iter().map(|name| mark(name)));
        names.extend(self.layers()?.iter().map(|(name, _)| mark(name)));
        self.stale.lock().append(&mut names);
        self.export_stale();
        Ok(())
    }
}

/// Checks the database, or makes the first one.
fn check(directory: &Directory, export: &Export) -> Result<(), StoreError> {
    let path = directory.file(STATE);
    if fs::metadata(&path).map_or(0, |metadata| metadata.len()) == 0 {
        if holds_functions(directory, export)? {
            return Err(StoreError::Missing { path });
        }
        let id = directory.id()?.unwrap_or_else(Uuid::new_v4);
        return create(directory, id, |_| Ok(()));
    }
    // A copy, because the check repairs what it can.
    let copy = directory.file(COPY);
    match copy_file(&path, &copy) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            let _ = fs::remove_file(copy);
            tracing::warn!("the disk is full: no copy of the database is kept");
            return Ok(());
        }
        copied => copied.map_err(|source| StoreError::Directory { path: copy.clone(), source })?,
    }
    let checked = OpenFile::open(&copy)
        .and_then(|file| check_identity(&file, &path, directory, export))
        .map_err(|error| error.about(&path));
    let kept = match &checked {
        Ok(_) => fs::rename(&copy, directory.file(GOOD)),
        Err(_) => fs::remove_file(&copy),
    };
    checked?;
    kept.map_err(|source| StoreError::Directory { path: copy, source })
}

/// Reads everything in a database, and checks that it belongs to the directory and is no older than
/// the export.
fn check_identity(
    file: &OpenFile,
    path: &Path,
    directory: &Directory,
    export: &Export,
) -> Result<Identity, StoreError> {
    let found = read_all(file).map_err(|error| match error {
        StoreError::Database(source) => StoreError::Damaged { path: path.to_owned(), source },
        error => error,
    })?;
    if let (Some(actual), Some(expected)) = (found.id, directory.id()?)
        && actual != expected
    {
        return Err(StoreError::Foreign { path: path.to_owned() });
    }
    for name in export.names()? {
        // A damaged file is written again.
        if export.read(&name).is_ok_and(|exported| exported.sequence > found.sequence) {
            let what = format!("the function {name}");
            return Err(StoreError::Older { path: path.to_owned(), what });
        }
    }
    for name in export.layers()? {
        if export.read_layer(&name).is_ok_and(|exported| exported.sequence > found.sequence) {
            let what = format!("the layer {name}");
            return Err(StoreError::Older { path: path.to_owned(), what });
        }
    }
    Ok(found)
}

fn read_all(file: &OpenFile) -> Result<Identity, StoreError> {
    let read = file.database.begin_read().map_err(failed)?;
    let mut found = Identity::default();
    match read.open_table(META) {
        Err(TableError::TableDoesNotExist(_)) => {}
        table => {
            let table = table.map_err(failed)?;
            let id = table.get(ID).map_err(failed)?;
            found.id = id.and_then(|id| Uuid::from_slice(id.value()).ok());
            found.sequence = sequence(&table)?;
        }
    }
    read_entries::<_, FunctionRecord>(read.open_table(FUNCTIONS))?;
    read_entries::<_, Version>(read.open_table(VERSIONS))?;
    read_entries::<_, Alias>(read.open_table(ALIASES))?;
    read_entries::<_, Attachments>(read.open_table(ATTACHMENTS))?;
    read_entries::<_, Layer>(read.open_table(LAYERS))?;
    Ok(found)
}

fn read_entries<K: redb::Key + 'static, T: DeserializeOwned>(
    table: Result<redb::ReadOnlyTable<K, &'static [u8]>, TableError>,
) -> Result<(), StoreError> {
    if matches!(table, Err(TableError::TableDoesNotExist(_))) {
        return Ok(());
    }
    let table = table.map_err(failed)?;
    for entry in table.iter().map_err(failed)? {
        parse::<T>(entry.map_err(failed)?.1.value())?;
    }
    Ok(())
}

/// Whether the directory has anything of a function.
fn holds_functions(directory: &Directory, export: &Export) -> Result<bool, StoreError> {
    let any = |folder: &str, is_own: fn(&str) -> bool| {
        let path = directory.file(folder);
        let entries = match fs::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            entries => entries.map_err(|source| StoreError::Directory { path, source })?,
        };
        Ok::<_, StoreError>(
            entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(is_own)),
        )
    };
    Ok(!export.names()?.is_empty()
        || !export.layers()?.is_empty()
        || any("code", is_code_file)?
        || any("snapshots", is_snapshot_name)?)
}

/// Makes a database in one step.
fn create(
    directory: &Directory,
    id: Uuid,
    fill: impl FnOnce(&Change) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let new = directory.file(NEW);
    create_private(&new).map_err(|source| StoreError::Directory { path: new.clone(), source })?;
    let file = OpenFile::open(&new)?;
    let change = Change::begin(&file.database)?;
    change.make_tables()?;
    change.identify(id)?;
    fill(&change)?;
    change.end()?;
    drop(file);
    install(directory, &new)?;
    directory.mark(id)
}

/// Gives a complete database its name.
fn install(directory: &Directory, new: &Path) -> Result<(), StoreError> {
    let path = directory.file(STATE);
    let installed = File::open(new).and_then(|file| file.sync_all());
    let installed = installed.and_then(|()| fs::rename(new, &path));
    installed.map_err(|source| StoreError::Directory { path, source })?;
    directory.sync()
}

/// Makes the database again: from the export, or from the last good copy if there is no export.
fn rebuild(directory: &Directory, export: &Export) -> Result<(), StoreError> {
    let names = export.names()?;
    // All or nothing: the code of a function that is left out would be removed.
    let functions = names.iter().map(|name| export.read(name));
    let functions: Vec<Exported> = functions.collect::<Result<_, _>>()?;
    let names = export.layers()?;
    let layers = names.iter().map(|name| export.read_layer(name));
    let layers: Vec<ExportedLayer> = layers.collect::<Result<_, _>>()?;
    let empty = functions.is_empty() && layers.is_empty();
    let (path, good) = (directory.file(STATE), directory.file(GOOD));
    if empty && !good.exists() {
        return Err(StoreError::NothingToRecover { path });
    }
    keep_damaged(directory, &path)?;
    if empty {
        let new = directory.file(NEW);
        copy_file(&good, &new).map_err(|source| StoreError::Directory { path: good, source })?;
        install(directory, &new)?;
    } else {
        let id = directory.id()?.unwrap_or_else(Uuid::new_v4);
        let sequences = functions.iter().map(|one| one.sequence);
        let sequences = sequences.chain(layers.iter().map(|one| one.sequence));
        let sequence = sequences.max().unwrap_or_default();
        create(directory, id, |change| {
            change.set_sequence(sequence)?;
            functions.iter().try_for_each(|function| put_all(change, function))?;
            layers.iter().try_for_each(|one| change.put_layer(&one.name, &one.layer))
        })?;
    }
    tracing::warn!(functions = functions.len(), layers = layers.len(), "recovered the database");
    Ok(())
}

fn put_all(change: &Change, exported: &Exported) -> Result<(), StoreError> {
    let name = &exported.function.latest.function;
    change.put_function(name, &exported.function)?;
    for version in &exported.versions {
        change.put_version(name, version.version.parse().unwrap_or_default(), version)?;
    }
    for (alias, value) in &exported.aliases {
        change.put_alias(name, alias, value)?;
    }
    for (qualifier, value) in &exported.attachments {
        change.put_attachments(name, qualifier, value)?;
    }
    Ok(())
}

/// Renames a damaged database, so that nothing is lost.
fn keep_damaged(directory: &Directory, path: &Path) -> Result<(), StoreError> {
    let mut names = (1..).map(|number| directory.file(&format!("{STATE}.damaged-{number}")));
    let free: Option<PathBuf> = names.find(|name| !name.exists());
    match free.map_or(Ok(()), |free| fs::rename(path, free)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        renamed => {
            renamed.map_err(|source| StoreError::Directory { path: path.to_owned(), source })
        }
    }
}

fn copy_file(from: &Path, to: &Path) -> io::Result<()> {
    let mut copy = create_private(to)?;
    io::copy(&mut File::open(from)?, &mut copy)?;
    copy.sync_all()
}
