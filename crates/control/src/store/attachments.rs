//! The table of what is attached to functions, versions and aliases.

use redb::{
    Key, ReadOnlyTable, ReadTransaction, ReadableDatabase, TableDefinition, TableError, Value,
};

use super::{Change, Named, Store, StoreError, failed, get, named, put};
use crate::functions::Attachments;

/// The key is the function's name and the version or alias, the value is JSON.
pub(super) const ATTACHMENTS: TableDefinition<'_, Named, &[u8]> =
    TableDefinition::new("attachments");

/// The key is the id of a URL, the value is the function's name and the version or alias.
const URLS: TableDefinition<'_, &str, Named> = TableDefinition::new("urls");

impl Store {
    /// The function, and its version or alias, that a URL invokes.
    pub(crate) fn url(&self, id: &str) -> Result<Option<(String, String)>, StoreError> {
        self.with(|database| {
            let read = database.begin_read().map_err(failed)?;
            let Some(table) = table(&read, URLS)? else { return Ok(None) };
            let found = table.get(id).map_err(failed)?;
            Ok(found.map(|found| (found.value().0.to_owned(), found.value().1.to_owned())))
        })
    }

    /// What is attached to `qualifier` of a function.
    pub(crate) fn attachments(
        &self,
        name: &str,
        qualifier: &str,
    ) -> Result<Attachments, StoreError> {
        self.with(|database| {
            let found = match table(&database.begin_read().map_err(failed)?, ATTACHMENTS)? {
                Some(table) => get(&table, (name, qualifier))?,
                None => None,
            };
            Ok(found.unwrap_or_default())
        })
    }

    /// What is attached to a function, its versions and aliases.
    pub(crate) fn all_attachments(
        &self,
        name: &str,
    ) -> Result<Vec<(String, Attachments)>, StoreError> {
        self.with(|database| all(&database.begin_read().map_err(failed)?, name))
    }
}

/// What is attached to a function, its versions and aliases.
pub(super) fn all(
    read: &ReadTransaction,
    name: &str,
) -> Result<Vec<(String, Attachments)>, StoreError> {
    table(read, ATTACHMENTS)?.map_or_else(|| Ok(Vec::new()), |table| named(&table, name))
}

/// A table. A database of an earlier version has none, and it is made with its first entry.
pub(super) fn table<K: Key + 'static, V: Value + 'static>(
    read: &ReadTransaction,
    definition: TableDefinition<'_, K, V>,
) -> Result<Option<ReadOnlyTable<K, V>>, StoreError> {
    match read.open_table(definition) {
        Err(TableError::TableDoesNotExist(_)) => Ok(None),
        table => Ok(Some(table.map_err(failed)?)),
    }
}

impl Change {
    pub(crate) fn attachments(
        &self,
        name: &str,
        qualifier: &str,
    ) -> Result<Attachments, StoreError> {
        let table = self.transaction.open_table(ATTACHMENTS).map_err(failed)?;
        Ok(get(&table, (name, qualifier))?.unwrap_or_default())
    }

    /// What is attached to a function, its versions and aliases.
    pub(crate) fn all_attachments(
        &self,
        name: &str,
    ) -> Result<Vec<(String, Attachments)>, StoreError> {
        let table = self.transaction.open_table(ATTACHMENTS).map_err(failed)?;
        named(&table, name)
    }

    /// Stores what is attached to `qualifier` of a function.
    pub(crate) fn put_attachments(
        &self,
        name: &str,
        qualifier: &str,
        value: &Attachments,
    ) -> Result<(), StoreError> {
        self.touch(name);
        let before = self.attachments(name, qualifier)?.url;
        if let Some(gone) = before.filter(|_| value.url.is_none()) {
            let mut urls = self.transaction.open_table(URLS).map_err(failed)?;
            urls.remove(gone.id.as_str()).map_err(failed)?;
        }
        if let Some(url) = &value.url {
            let mut urls = self.transaction.open_table(URLS).map_err(failed)?;
            urls.insert(url.id.as_str(), (name, qualifier)).map_err(failed)?;
        }
        let mut table = self.transaction.open_table(ATTACHMENTS).map_err(failed)?;
        if *value == Attachments::default() {
            table.remove((name, qualifier)).map_err(failed)?;
            return Ok(());
        }
        put(table, (name, qualifier), value)
    }

    /// Removes what is attached to a function, its versions and aliases.
    pub(super) fn remove_all_attachments(&self, name: &str) -> Result<(), StoreError> {
        let all = self.all_attachments(name)?;
        let none = Attachments::default();
        all.iter().try_for_each(|(qualifier, _)| self.put_attachments(name, qualifier, &none))
    }
}
