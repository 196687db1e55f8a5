//! Aliases.

use std::collections::BTreeMap;
use std::sync::Arc;

use uuid::Uuid;

use super::Control;
use super::errors::{AliasError, FindError, NotFound, RevisionMismatch};
use super::functions::function;
use crate::blocking::blocking;
use crate::functions::{
    Alias, Attachments, FunctionRecord, LATEST, Target, is_alias, new_revision,
};
use crate::store::Change;

/// The parts of an alias to set; `None` leaves a part as it is.
#[derive(Debug, Default)]
pub struct AliasChange {
    /// The version that the alias names.
    pub version: Option<String>,
    /// Versions that get a part of the requests, and that part, 0 to 1: at most one.
    pub weights: Option<BTreeMap<String, f64>>,
    /// Free text.
    pub description: Option<String>,
}

impl Control {
    /// Creates the alias `alias`. The change has to name a version.
    ///
    /// # Errors
    /// See [`AliasError`].
    pub async fn create_alias(
        self: &Arc<Self>,
        target: &Target,
        alias: String,
        new: AliasChange,
    ) -> Result<Alias, AliasError> {
        if !is_alias(&alias) {
            return Err(AliasError::Name(alias));
        }
        let (control, target) = (Arc::clone(self), target.clone());
        blocking(move || {
            control.store.change(|change| {
                let name = target.name();
                function::<AliasError>(change, &target)?;
                if change.alias(name, &alias)?.is_some() {
                    return Err(AliasError::Exists(target.with_qualifier(alias.as_str())));
                }
                if new.version.is_none() {
                    return Err(AliasError::NoVersion);
                }
                let empty = Alias {
                    version: String::new(),
                    additional: None,
                    description: String::new(),
                    revision: Uuid::nil(),
                };
                put(change, &target, &alias, empty, new)
            })
        })
        .await
    }

    /// An alias of a function.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn alias(self: &Arc<Self>, target: &Target, alias: &str) -> Result<Alias, FindError> {
        let (control, target, alias) = (Arc::clone(self), target.clone(), alias.to_owned());
        blocking(move || {
            check_owner(control.store.function(target.name())?, &target)?;
            let found = control.store.alias(target.name(), &alias)?;
            Ok(found.ok_or_else(|| NotFound::Alias(target.with_qualifier(alias)))?)
        })
        .await
    }

    /// The aliases of a function, sorted by name.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn aliases(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<Vec<(String, Alias)>, FindError> {
        let (control, target) = (Arc::clone(self), target.clone());
        blocking(move || {
            control.find_now(&target)?;
            Ok(control.store.aliases(target.name())?)
        })
        .await
    }

    /// Changes an alias, if its revision is `revision` or `revision` is `None`.
    ///
    /// # Errors
    /// See [`AliasError`].
    pub async fn update_alias(
        self: &Arc<Self>,
        target: &Target,
        alias: &str,
        update: AliasChange,
        revision: Option<String>,
    ) -> Result<Alias, AliasError> {
        let (control, target, alias) = (Arc::clone(self), target.clone(), alias.to_owned());
        blocking(move || {
            let changed = control.store.change(|change| {
                check_owner(change.function(target.name())?, &target)?;
                let found = change.alias(target.name(), &alias)?;
                let missing = || NotFound::Alias(target.with_qualifier(alias.as_str()));
                let found = found.ok_or_else(missing)?;
                let current = found.revision.to_string();
                if revision.as_ref().is_some_and(|expected| *expected != current) {
                    return Err(AliasError::Revision(RevisionMismatch));
                }
                let changed = put(change, &target, &alias, found, update)?;
                control.check_provisioned::<AliasError>(change, target.name())?;
                Ok::<_, AliasError>(changed)
            })?;
            control.recount_provisioned();
            Ok(changed)
        })
        .await
    }

    /// Deletes an alias, if it exists.
    ///
    /// # Errors
    /// The database failed.
    pub async fn delete_alias(
        self: &Arc<Self>,
        target: &Target,
        alias: &str,
    ) -> Result<(), FindError> {
        let (control, target, alias) = (Arc::clone(self), target.clone(), alias.to_owned());
        blocking(move || {
            control.store.delete(|change| {
                check_owner(change.function(target.name())?, &target)?;
                // The path may name $LATEST or a version, which keep what is attached to them.
                if is_alias(&alias) {
                    change.remove_alias(target.name(), &alias)?;
                    change.put_attachments(target.name(), &alias, &Attachments::default())?;
                }
                Ok::<_, FindError>(())
            })?;
            control.recount_provisioned();
            Ok(())
        })
        .await
    }
}

/// Fails if there is a function that belongs to another tenant than the one that asks.
fn check_owner(function: Option<FunctionRecord>, target: &Target) -> Result<(), NotFound> {
    function.map_or(Ok(()), |function| function.check_owner(target))
}

/// Applies `update` to `alias` and stores it with a new revision.
fn put(
    change: &Change,
    target: &Target,
    name: &str,
    mut alias: Alias,
    update: AliasChange,
) -> Result<Alias, AliasError> {
    if let Some(version) = update.version {
        let exists = match version.parse() {
            Ok(number) => change.version(target.name(), number)?.is_some(),
            Err(_) => version == LATEST,
        };
        if !exists {
            return Err(NotFound::Function(target.with_qualifier(version)).into());
        }
        alias.version = version;
    }
    if let Some(weights) = update.weights {
        alias.additional = additional(change, target, weights)?;
    }
    if let Some((version, _)) = &alias.additional
        && (*version == alias.version || alias.version == LATEST)
    {
        return Err(AliasError::Weights("the alias and its weights name two published versions"));
    }
    alias.description = update.description.unwrap_or(alias.description);
    alias.revision = new_revision();
    change.put_alias(target.name(), name, &alias)?;
    Ok(alias)
}

/// The version that gets a part of an alias's requests.
fn additional(
    change: &Change,
    target: &Target,
    weights: BTreeMap<String, f64>,
) -> Result<Option<(String, f64)>, AliasError> {
    if weights.len() > 1 {
        return Err(AliasError::Weights("an alias has at most one additional version"));
    }
    let Some((version, part)) = weights.into_iter().next() else { return Ok(None) };
    if !(0.0..=1.0).contains(&part) {
        return Err(AliasError::Weights("a weight is between 0 and 1"));
    }
    let Ok(number) = version.parse() else {
        return Err(AliasError::Weights("an additional version is a published version"));
    };
    if change.version(target.name(), number)?.is_none() {
        return Err(NotFound::Function(target.with_qualifier(version)).into());
    }
    Ok(Some((version, part)))
}
