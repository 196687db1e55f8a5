//! The keys that sign snapshots and check their signatures: Ed25519 (RFC 8032), in PEM files as
//! openssl makes them (RFC 8410).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{
    self, DecodePrivateKey, DecodePublicKey, EncodePrivateKey, KeypairBytes, spki,
};
use ed25519_dalek::{Signature, Signer as _, SigningKey, VerifyingKey};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Bytes of a signature.
pub(crate) const SIGNATURE_LEN: usize = ed25519_dalek::SIGNATURE_LENGTH;

/// What every signed message begins with, so that no signature of another kind is taken for one of
/// a snapshot.
const CONTEXT: &[u8] = b"firn snapshot manifest v1\0";

/// Signs snapshots for one tenant.
#[derive(Debug)]
pub struct Signer {
    key: SigningKey,
    tenant: String,
}

/// Checks that snapshots were signed for one tenant, with one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verifier {
    key: VerifyingKey,
    tenant: String,
}

/// Why a key cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The file cannot be read.
    #[error("cannot read the key {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The file is readable or writable for other users.
    #[error("other users have access to the signing key {}; change that with chmod 600", .path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
    },
    /// The file has no signing key.
    #[error(
        "{} has no Ed25519 signing key in PKCS#8 PEM; make one with \
         `openssl genpkey -algorithm ed25519 -out FILE`", .path.display()
    )]
    Signing {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: pkcs8::Error,
    },
    /// The file has no public key.
    #[error(
        "{} has no Ed25519 public key in PEM; make it from the signing key with \
         `openssl pkey -in SIGNING_KEY -pubout -out FILE`", .path.display()
    )]
    Public {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: spki::Error,
    },
    /// A new key cannot be written.
    #[error("cannot make the signing key {}", .path.display())]
    Make {
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl Signer {
    /// The key in a file that only its owner can access.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn read(path: &Path, tenant: &str) -> Result<Self, KeyError> {
        let read = |source| KeyError::Read { path: path.into(), source };
        let file = File::open(path).map_err(read)?;
        if file.metadata().map_err(read)?.mode() & 0o077 != 0 {
            return Err(KeyError::Exposed { path: path.into() });
        }
        let pem = io::read_to_string(file).map_err(read)?;
        let key = SigningKey::from_pkcs8_pem(&pem)
            .map_err(|source| KeyError::Signing { path: path.into(), source })?;
        Ok(Self { key, tenant: tenant.to_owned() })
    }

    /// The key in a file, which is made where there is none. Its directory must exist, and no other
    /// process may make the same key.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn read_or_make(path: &Path, tenant: &str) -> Result<Self, KeyError> {
        match Self::read(path, tenant) {
            Err(KeyError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                make(path).map_err(|source| KeyError::Make { path: path.into(), source })?;
                Self::read(path, tenant)
            }
            key => key,
        }
    }

    /// What checks the signatures of this key.
    #[must_use]
    pub fn verifier(&self) -> Verifier {
        Verifier { key: self.key.verifying_key(), tenant: self.tenant.clone() }
    }

    /// Signs a statement about a snapshot.
    pub(crate) fn sign(&self, statement: &[u8]) -> [u8; SIGNATURE_LEN] {
        self.key.sign(&message(&self.tenant, statement)).to_bytes()
    }
}

impl Verifier {
    /// The public key in a file.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn read(path: &Path, tenant: &str) -> Result<Self, KeyError> {
        let pem = fs::read_to_string(path)
            .map_err(|source| KeyError::Read { path: path.into(), source })?;
        let key = VerifyingKey::from_public_key_pem(&pem)
            .map_err(|source| KeyError::Public { path: path.into(), source })?;
        Ok(Self { key, tenant: tenant.to_owned() })
    }

    /// The tenant that snapshots must be signed for.
    pub(crate) fn tenant(&self) -> &str {
        &self.tenant
    }

    /// Whether the key has signed a statement for the tenant.
    pub(crate) fn confirms(&self, statement: &[u8], signature: &[u8; SIGNATURE_LEN]) -> bool {
        let signature = Signature::from_bytes(signature);
        self.key.verify_strict(&message(&self.tenant, statement), &signature).is_ok()
    }
}

/// The bytes that are signed. The tenant's length separates it from what follows.
fn message(tenant: &str, statement: &[u8]) -> Vec<u8> {
    let len = u64::try_from(tenant.len()).unwrap_or(u64::MAX);
    [CONTEXT, &len.to_le_bytes(), tenant.as_bytes(), statement].concat()
}

/// Makes a key, whose file appears whole.
fn make(path: &Path) -> io::Result<()> {
    let mut secret_key = [0; ed25519_dalek::SECRET_KEY_LENGTH];
    // Reads of up to 256 bytes are never cut short (getrandom(2)).
    getrandom(&mut secret_key, GetRandomFlags::empty())?;
    // Without the public key, which openssl before version 3.5 does not read.
    let pem = KeypairBytes { secret_key, public_key: None }.to_pkcs8_pem(LineEnding::LF);
    let pem = pem.map_err(io::Error::other)?;
    let new = path.with_extension("new");
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(pem.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
#[path = "keys_tests.rs"]
mod tests;
