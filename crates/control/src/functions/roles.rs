//! The AWS keys of functions' roles.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use firn_run::RoleCredentials;

/// The section for roles that have none.
const DEFAULT: &str = "default";

/// How long a function may use keys before it requests them again, seconds. AWS's SDKs do so a
/// quarter of an hour before the end.
const LIFETIME: u64 = 20 * 60;

/// A file in the format of `~/.aws/credentials`, whose sections are roles' ARNs. It is read for
/// each use, so that changed keys take effect.
#[derive(Debug, Clone)]
pub(crate) struct Roles {
    path: PathBuf,
}

/// The file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RolesError {
    /// It cannot be read.
    #[error("cannot read the roles' keys in {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It has no keys.
    #[error(
        "{} has no section with aws_access_key_id and aws_secret_access_key: name sections by a role's ARN, or default",
        path.display()
    )]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

impl Roles {
    /// Checks that the file has keys.
    pub(crate) fn open(path: &Path) -> Result<Self, RolesError> {
        let roles = Self { path: path.to_owned() };
        if roles.read()?.is_empty() {
            return Err(RolesError::Empty { path: roles.path });
        }
        Ok(roles)
    }

    /// The keys of a role, if it has any.
    pub(crate) fn of(&self, role: &str) -> Result<Option<RoleCredentials>, RolesError> {
        let mut sections = self.read()?;
        Ok(sections.remove(role).or_else(|| sections.remove(DEFAULT)))
    }

    fn read(&self) -> Result<BTreeMap<String, RoleCredentials>, RolesError> {
        let text = std::fs::read_to_string(&self.path)
            .map_err(|source| RolesError::Read { path: self.path.clone(), source })?;
        Ok(parse(&text))
    }
}

/// The sections that have both keys.
fn parse(text: &str) -> BTreeMap<String, RoleCredentials> {
    let mut sections = BTreeMap::new();
    let mut section = DEFAULT;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').trim();
        } else if let Some((name, value)) = line.split_once('=') {
            let found: &mut RoleCredentials = sections.entry(section.to_owned()).or_default();
            let value = value.trim().to_owned();
            match name.trim() {
                "aws_access_key_id" => found.access_key_id = value,
                "aws_secret_access_key" => found.secret_access_key = value,
                "aws_session_token" => found.session_token = value,
                _ => {}
            }
            found.lifetime_s = LIFETIME;
        }
    }
    sections.retain(|_, keys| !keys.access_key_id.is_empty() && !keys.secret_access_key.is_empty());
    sections
}

#[cfg(test)]
#[path = "roles_tests.rs"]
mod tests;
