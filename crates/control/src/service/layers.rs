//! Layers: publish, read, delete, and use in functions.

use std::sync::Arc;

use super::Control;
use super::attachments::{add_statement, change_policy, remove_statement};
use super::errors::{AttachmentError, ChangeError, FindError};
use super::functions::Hold;
use crate::blocking::blocking;
use crate::functions::{
    Code, ConfigurationError, Layer, LayerAbout, LayerName, LayerVersion, MAX_LAYERS, MAX_UNPACKED,
    Permission, UsedLayer, Version, timestamp,
};
use crate::store::Change;

/// A version of a layer to publish.
#[derive(Debug)]
pub struct NewLayer {
    /// The layer's name: 1 to 140 letters, digits, hyphens and underscores.
    pub name: String,
    /// The tenant that publishes it.
    pub tenant: Option<String>,
    /// Its description.
    pub about: LayerAbout,
    /// The zip file.
    pub zip: Vec<u8>,
    /// Dropped together with the zip file.
    pub hold: Hold,
}

/// A version of a layer, and the tenant that names it.
#[derive(Debug, Clone)]
pub struct LayerTarget {
    /// The layer's name.
    pub name: String,
    /// The version's number.
    pub version: u64,
    /// The tenant. Layers of others do not exist for it.
    pub tenant: Option<String>,
}

impl Control {
    /// Publishes a version of a layer, the first of which creates the layer.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub async fn publish_layer(
        self: &Arc<Self>,
        new: NewLayer,
    ) -> Result<LayerVersion, ChangeError> {
        let control = Arc::clone(self);
        let published = blocking(move || control.publish_layer_now(new)).await;
        if let Err(ChangeError::Quota(_)) = published {
            self.sweep_code().await;
        }
        published
    }

    fn publish_layer_now(&self, new: NewLayer) -> Result<LayerVersion, ChangeError> {
        let _lock = self.code_lock.lock();
        let code: Code = self.code.put(&new.zip)?;
        let (name, owner) = (new.name.as_str(), new.tenant.as_deref());
        self.store.change(|change| {
            let layer = change.layer(name)?;
            if layer.as_ref().is_some_and(|layer| layer.is_of_other(owner)) {
                return Err(ChangeError::LayerExists(new.name.clone()));
            }
            let first =
                || Layer { owner: new.tenant.clone(), next_version: 1, versions: Vec::new() };
            let mut layer = layer.unwrap_or_else(first);
            let version = LayerVersion {
                version: layer.next_version,
                code,
                about: new.about,
                created: timestamp(),
                permissions: Vec::new(),
                permissions_revision: uuid::Uuid::nil(),
            };
            layer.next_version += 1;
            layer.versions.push(version.clone());
            change.put_layer(name, &layer)?;
            self.tenants.check_layers::<ChangeError>(change, layer.owner.as_deref())?;
            Ok(version)
        })
    }

    /// The layers that a tenant can see, with their versions, oldest first.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn layers(
        self: &Arc<Self>,
        tenant: Option<String>,
    ) -> Result<Vec<(String, Vec<LayerVersion>)>, FindError> {
        let control = Arc::clone(self);
        blocking(move || {
            let all = control.store.layers()?.into_iter();
            let own = all.filter(|(_, layer)| !layer.is_of_other(tenant.as_deref()));
            Ok(own.map(|(name, layer)| (name, layer.versions)).collect())
        })
        .await
    }

    /// The versions of a layer, oldest first; none if there is no such layer.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn layer_versions(
        self: &Arc<Self>,
        name: String,
        tenant: Option<String>,
    ) -> Result<Vec<LayerVersion>, FindError> {
        let control = Arc::clone(self);
        blocking(move || {
            let layer = control.store.layer(&name)?;
            let own = layer.filter(|layer| !layer.is_of_other(tenant.as_deref()));
            Ok(own.map_or_else(Vec::new, |layer| layer.versions))
        })
        .await
    }

    /// A version of a layer, if it exists.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn layer_version(
        self: &Arc<Self>,
        target: LayerTarget,
    ) -> Result<Option<LayerVersion>, FindError> {
        let LayerTarget { name, version, tenant } = target;
        let versions = self.layer_versions(name, tenant).await?;
        Ok(versions.into_iter().find(|found| found.version == version))
    }

    /// The path of the zip file of a version of a layer.
    #[must_use]
    pub fn layer_path(&self, version: &LayerVersion) -> std::path::PathBuf {
        self.code.path(&version.code)
    }

    /// Deletes a version of a layer, if it exists. Functions that have it keep it.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn delete_layer(self: &Arc<Self>, target: LayerTarget) -> Result<(), FindError> {
        let control = Arc::clone(self);
        blocking(move || {
            control.store.delete(|change| {
                let found = change.layer(&target.name)?;
                let own = found.filter(|layer| !layer.is_of_other(target.tenant.as_deref()));
                let Some(mut layer) = own else { return Ok::<_, FindError>(()) };
                layer.versions.retain(|found| found.version != target.version);
                Ok(change.put_layer(&target.name, &layer)?)
            })
        })
        .await?;
        self.sweep_code().await;
        Ok(())
    }

    /// Adds a permission to a version of a layer. Returns the new revision of all.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn add_layer_permission(
        self: &Arc<Self>,
        target: LayerTarget,
        new: Permission,
        revision: Option<String>,
    ) -> Result<String, AttachmentError> {
        self.change_layer(target, revision, |all| add_statement(all, new)).await
    }

    /// Removes a permission of a version of a layer.
    ///
    /// # Errors
    /// See [`AttachmentError`].
    pub async fn remove_layer_permission(
        self: &Arc<Self>,
        target: LayerTarget,
        id: String,
        revision: Option<String>,
    ) -> Result<(), AttachmentError> {
        self.change_layer(target, revision, |all| remove_statement(all, id)).await.map(drop)
    }

    async fn change_layer(
        self: &Arc<Self>,
        target: LayerTarget,
        revision: Option<String>,
        work: impl FnOnce(&mut Vec<Permission>) -> Result<(), AttachmentError> + Send + 'static,
    ) -> Result<String, AttachmentError> {
        let control = Arc::clone(self);
        blocking(move || {
            control.store.change(|change| {
                let found = change.layer(&target.name)?;
                let own = found.filter(|layer| !layer.is_of_other(target.tenant.as_deref()));
                let mut layer = own.ok_or(AttachmentError::NoLayer)?;
                let mut versions = layer.versions.iter_mut();
                let version = versions.find(|found| found.version == target.version);
                let version = version.ok_or(AttachmentError::NoLayer)?;
                let current = &mut version.permissions_revision;
                change_policy(&mut version.permissions, current, revision, work)?;
                let revision = current.to_string();
                change.put_layer(&target.name, &layer)?;
                Ok(revision)
            })
        })
        .await
    }
}

impl Layer {
    /// Whether it belongs to another tenant than `tenant`. Layers without an owner belong to all.
    pub(super) fn is_of_other(&self, tenant: Option<&str>) -> bool {
        matches!((self.owner.as_deref(), tenant), (Some(owner), Some(tenant)) if owner != tenant)
    }
}

/// The layers that a function of `tenant` names, in the transaction that stores them in it.
pub(super) fn find_layers(
    change: &Change,
    names: &[LayerName],
    tenant: Option<&str>,
) -> Result<Vec<UsedLayer>, ChangeError> {
    if names.len() > MAX_LAYERS {
        return Err(ConfigurationError::TooManyLayers.into());
    }
    let mut used = Vec::new();
    for (index, LayerName { layer: name, version, arn }) in names.iter().enumerate() {
        if let Some(other) = names.iter().take(index).find(|other| other.layer == *name) {
            return Err(ConfigurationError::LayerTwice(other.arn.clone(), arn.clone()).into());
        }
        let layer = change.layer(name)?.filter(|layer| !layer.is_of_other(tenant));
        let versions = layer.map_or_else(Vec::new, |layer| layer.versions);
        let found = versions.into_iter().find(|found| found.version == *version);
        let code = found.ok_or_else(|| ConfigurationError::NoLayer(arn.clone()))?.code;
        used.push(UsedLayer { layer: name.clone(), version: *version, code });
    }
    Ok(used)
}

/// Checks the size of a function with its layers. That of the function alone was checked.
pub(super) fn check_content(version: &Version) -> Result<(), ConfigurationError> {
    let content: u64 = version.codes().map(|code| code.content).sum();
    match content {
        content if content > MAX_UNPACKED && !version.layers.is_empty() => {
            Err(ConfigurationError::TooLarge(content))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "layers_tests.rs"]
mod tests;
