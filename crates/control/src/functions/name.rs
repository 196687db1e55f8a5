//! Names of functions, versions and aliases.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::LATEST;

/// The longest name of a function, in characters.
const MAX_NAME: usize = 64;

/// The longest qualifier, in characters.
const MAX_QUALIFIER: usize = 128;

/// A function, and the version or alias of it that a request names.
///
/// ```
/// use firn_control::Target;
///
/// let target = Target::new("resize", Some("live"))?;
/// assert_eq!((target.name(), target.qualifier()), ("resize", Some("live")));
/// assert!(Target::new("../resize", None).is_err());
/// # Ok::<(), firn_control::NameError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    name: String,
    qualifier: Option<String>,
    tenant: Option<String>,
}

/// A name or qualifier is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The function's name.
    #[error(
        "a function's name has 1 to {MAX_NAME} letters, digits, hyphens or underscores; {0:?} is not valid"
    )]
    Function(String),
    /// The version or alias.
    #[error(
        "a version is {LATEST} or a number, an alias has 1 to {MAX_QUALIFIER} letters, digits, hyphens or underscores; \
         {0:?} is not valid"
    )]
    Qualifier(String),
}

impl Target {
    /// The function `name`, or its version or alias `qualifier`.
    ///
    /// # Errors
    /// A name is not valid.
    pub fn new(name: &str, qualifier: Option<&str>) -> Result<Self, NameError> {
        if !is_word(name, MAX_NAME) {
            return Err(NameError::Function(name.to_owned()));
        }
        if let Some(qualifier) = qualifier.filter(|qualifier| !is_qualifier(qualifier)) {
            return Err(NameError::Qualifier(qualifier.to_owned()));
        }
        Ok(Self {
            name: name.to_owned(),
            qualifier: qualifier.map(ToOwned::to_owned),
            tenant: None,
        })
    }

    /// The same, on behalf of a tenant. Without one, functions of all tenants are found.
    #[must_use]
    pub fn of_tenant(self, tenant: Option<String>) -> Self {
        Self { tenant, ..self }
    }

    /// Another target, on behalf of the tenant of this one.
    #[must_use]
    pub fn of_same_tenant(&self, other: Self) -> Self {
        other.of_tenant(self.tenant.clone())
    }

    /// The tenant.
    pub(crate) fn tenant(&self) -> Option<&str> {
        self.tenant.as_deref()
    }

    /// The function's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version or alias, where the request names one.
    #[must_use]
    pub fn qualifier(&self) -> Option<&str> {
        self.qualifier.as_deref()
    }

    /// The function, without the version or alias.
    #[must_use]
    pub fn function(&self) -> Self {
        Self { qualifier: None, ..self.clone() }
    }

    /// Another version or alias of the same function. The caller has validated `qualifier`, or uses
    /// the result only in an error.
    pub(crate) fn with_qualifier(&self, qualifier: impl Into<String>) -> Self {
        Self { qualifier: Some(qualifier.into()), ..self.clone() }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.qualifier.as_ref().map_or(Ok(()), |qualifier| write!(f, ":{qualifier}"))
    }
}

/// Whether `name` can name an alias. Numbers cannot, because they name versions.
pub(crate) fn is_alias(name: &str) -> bool {
    is_word(name, MAX_QUALIFIER) && !name.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_qualifier(text: &str) -> bool {
    text == LATEST || is_word(text, MAX_QUALIFIER)
}

fn is_word(text: &str, longest: usize) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=longest).contains(&text.len()) && text.bytes().all(fits)
}

#[cfg(test)]
#[path = "name_tests.rs"]
mod tests;
