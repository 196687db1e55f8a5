//! The table of layers, and their part of the export.

use redb::{ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition};

use super::attachments::table;
use super::export::ExportedLayer;
use super::{Change, META, Store, StoreError, failed, get, parse, put, sequence};
use crate::functions::Layer;

/// The key is the layer's name, the value is JSON.
pub(super) const LAYERS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("layers");

/// Ends what stands for a layer in the export and among the changed functions. No function's name
/// has a dot.
const SUFFIX: &str = ".layer";

/// What stands for a layer among the names of functions.
pub(super) fn mark(layer: &str) -> String {
    format!("{layer}{SUFFIX}")
}

/// The layer that a [`mark`] stands for.
pub(super) fn marked(name: &str) -> Option<&str> {
    name.strip_suffix(SUFFIX)
}

impl Store {
    pub(crate) fn layer(&self, name: &str) -> Result<Option<Layer>, StoreError> {
        self.with(|database| read_layer(&database.begin_read().map_err(failed)?, name))
    }

    /// All layers, sorted by name.
    pub(crate) fn layers(&self) -> Result<Vec<(String, Layer)>, StoreError> {
        self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            table(&read, LAYERS)?.map_or_else(|| Ok(Vec::new()), |table| all(&table))
        })
    }

    /// Exports a layer.
    pub(super) fn export_layer(&self, name: &str) -> Result<(), StoreError> {
        let current = self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            let Some(layer) = read_layer(&read, name)? else { return Ok(None) };
            let sequence = sequence(&read.open_table(META).map_err(failed)?)?;
            Ok::<_, StoreError>(Some(ExportedLayer::new(sequence, name, layer)))
        })?;
        let mark = mark(name);
        let written = match current {
            None => self.export.remove(&mark),
            Some(current) => match self.export.read_layer(name) {
                Ok(last) if last.layer == current.layer => Ok(()),
                _ => self.export.write(&mark, &current),
            },
        };
        written.map_err(|source| StoreError::Directory { path: self.export.path(&mark), source })
    }
}

impl Change {
    pub(crate) fn layer(&self, name: &str) -> Result<Option<Layer>, StoreError> {
        get(&self.transaction.open_table(LAYERS).map_err(failed)?, name)
    }

    /// All layers, sorted by name.
    pub(crate) fn layers(&self) -> Result<Vec<(String, Layer)>, StoreError> {
        all(&self.transaction.open_table(LAYERS).map_err(failed)?)
    }

    pub(crate) fn put_layer(&self, name: &str, layer: &Layer) -> Result<(), StoreError> {
        self.touch(&mark(name));
        put(self.transaction.open_table(LAYERS).map_err(failed)?, name, layer)
    }
}

fn read_layer(read: &ReadTransaction, name: &str) -> Result<Option<Layer>, StoreError> {
    table(read, LAYERS)?.map_or(Ok(None), |table| get(&table, name))
}

fn all(
    table: &impl ReadableTable<&'static str, &'static [u8]>,
) -> Result<Vec<(String, Layer)>, StoreError> {
    let entries = table.iter().map_err(failed)?;
    let pair = |(key, value): (redb::AccessGuard<'_, &str>, redb::AccessGuard<'_, &[u8]>)| {
        Ok((key.value().to_owned(), parse(value.value())?))
    };
    entries.map(|entry| pair(entry.map_err(failed)?)).collect()
}
