//! The document of a metadata service.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Map, Value};
use thiserror::Error;

/// A JSON document that its owner changes and guests read.
///
/// All clones of a store are the same document. It is safe to use from several threads: a reader
/// finds a document as one call has left it.
#[derive(Clone, Debug)]
pub struct MetadataStore {
    /// Null before the first [`MetadataStore::put`].
    document: Arc<Mutex<Option<Value>>>,
    limit: usize,
}

/// A document cannot be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PutMetadataError {
    /// It is too large.
    #[error("the metadata has {bytes} bytes as JSON without spaces; the limit is {limit}")]
    TooLarge {
        /// Its size, bytes.
        bytes: usize,
        /// The store's limit, bytes.
        limit: usize,
    },
}

/// A document cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PatchMetadataError {
    /// There is no document.
    #[error("there is no metadata to change: put a document first")]
    Empty,
    /// It cannot be stored after the change.
    #[error(transparent)]
    Put(#[from] PutMetadataError),
}

impl Default for MetadataStore {
    fn default() -> Self {
        Self::with_limit(Self::DEFAULT_LIMIT)
    }
}

impl MetadataStore {
    /// The limit of a document, bytes of JSON without spaces. It is Firecracker's.
    pub const DEFAULT_LIMIT: usize = 51_200;

    /// An empty store for documents of at most `limit` bytes of JSON without spaces.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self { document: Arc::default(), limit }
    }

    /// Replaces the document.
    ///
    /// # Errors
    /// It is too large. The store is as before.
    pub fn put(&self, document: Value) -> Result<(), PutMetadataError> {
        self.check(&document)?;
        *self.document.lock() = Some(document);
        Ok(())
    }

    /// Changes the document by a JSON merge patch (RFC 7396).
    ///
    /// # Errors
    /// There is no document, or it would be too large. The store is as before.
    pub fn patch(&self, patch: Value) -> Result<(), PatchMetadataError> {
        let mut document = self.document.lock();
        let mut changed = document.clone().ok_or(PatchMetadataError::Empty)?;
        merge(&mut changed, patch);
        self.check(&changed)?;
        *document = Some(changed);
        Ok(())
    }

    /// The document; null before there is one.
    #[must_use]
    pub fn document(&self) -> Value {
        self.document.lock().clone().unwrap_or_default()
    }

    /// What is at a JSON pointer (RFC 6901), made into an answer while the document does not
    /// change.
    pub(super) fn at<T>(&self, pointer: &str, answer: impl FnOnce(&Value) -> T) -> Option<T> {
        self.document.lock().as_ref()?.pointer(pointer).map(answer)
    }

    fn check(&self, document: &Value) -> Result<(), PutMetadataError> {
        let (bytes, limit) = (document.to_string().len(), self.limit);
        if bytes > limit { Err(PutMetadataError::TooLarge { bytes, limit }) } else { Ok(()) }
    }
}

/// `MergePatch` of RFC 7396, 2. A document that was parsed is nested at most 128 deep.
fn merge(target: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = Map::new().into();
    }
    let Value::Object(target) = target else { return };
    for (name, value) in patch {
        if value.is_null() {
            target.remove(&name);
        } else {
            merge(target.entry(name).or_insert(Value::Null), value);
        }
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
