//! The file with the keys that clients sign with, in the format of `~/.aws/credentials`. A section
//! is a tenant, whose quotas are in it too.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use firn_control::Quotas;

/// The tenant of keys before the first section.
const DEFAULT: &str = "default";

/// The keys that can sign requests, and their tenants.
#[derive(Clone, Default)]
pub struct Credentials {
    /// By access key.
    keys: HashMap<String, Key>,
    tenants: BTreeMap<String, Quotas>,
}

/// One key.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) secret: String,
    pub(crate) tenant: String,
}

/// Credentials cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The file cannot be read.
    #[error("cannot read the credentials in {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file holds no credentials.
    #[error(
        "{} holds no credentials: it needs aws_access_key_id and aws_secret_access_key, as in ~/.aws/credentials",
        path.display()
    )]
    None {
        /// The file.
        path: PathBuf,
    },
    /// A setting of firn in it is not valid.
    #[error("{}: line {line}: {reason}", path.display())]
    Setting {
        /// The file.
        path: PathBuf,
        /// The line's number, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.keys.keys()).finish()
    }
}

impl Credentials {
    /// Reads a file in the format of `~/.aws/credentials`: sections, each with `aws_access_key_id`
    /// and `aws_secret_access_key`, and with `firn_planners`, `firn_functions`, `firn_versions`,
    /// `firn_code` and `firn_snapshots` where the tenant has such quotas.
    ///
    /// # Errors
    /// See [`CredentialsError`].
    pub fn read(path: &Path) -> Result<Self, CredentialsError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| CredentialsError::Read { path: path.to_owned(), source })?;
        let found = Self::parse(&text).map_err(|(line, reason)| CredentialsError::Setting {
            path: path.to_owned(),
            line,
            reason,
        })?;
        if found.keys.is_empty() {
            return Err(CredentialsError::None { path: path.to_owned() });
        }
        Ok(found)
    }

    /// The tenants and their quotas.
    #[must_use]
    pub fn tenants(&self) -> &BTreeMap<String, Quotas> {
        &self.tenants
    }

    pub(crate) fn key(&self, access_key: &str) -> Option<&Key> {
        self.keys.get(access_key)
    }

    /// The key that this program signs with.
    pub(crate) fn first(&self) -> Option<(&String, &Key)> {
        self.keys.iter().min_by_key(|(access_key, _)| *access_key)
    }

    /// Parses the text of a file. An error has the number of its line.
    pub(crate) fn parse(text: &str) -> Result<Self, (usize, String)> {
        let mut found = Self::default();
        let mut tenant = DEFAULT.to_owned();
        let (mut key, mut secret) = (None, None);
        for (number, line) in (1..).zip(text.lines().map(str::trim)) {
            if let Some(section) = line.strip_prefix('[') {
                (key, secret) = (None, None);
                tenant = section.trim_end_matches(']').trim().to_owned();
            }
            let Some((name, value)) = line.split_once('=') else { continue };
            let (name, value) = (name.trim(), value.trim());
            match name {
                "aws_access_key_id" => key = Some(value.to_owned()),
                "aws_secret_access_key" => secret = Some(value.to_owned()),
                _ => {}
            }
            if let Some(quota) = name.strip_prefix("firn_") {
                let quotas = found.tenants.entry(tenant.clone()).or_default();
                quotas.set(quota, value).map_err(|reason| (number, format!("{name}: {reason}")))?;
            }
            if let (Some(key), Some(secret)) = (&key, &secret) {
                let key_of = Key { secret: secret.clone(), tenant: tenant.clone() };
                found.keys.insert(key.clone(), key_of);
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
#[path = "credentials_tests.rs"]
mod tests;
