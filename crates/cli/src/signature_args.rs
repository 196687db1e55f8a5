//! Keys that sign snapshots, and that check their signatures.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use firn_snapshot::{KeyError, Signer, Verifier};

/// The tenant of snapshots that name none.
const TENANT: &str = "default";

/// The key that must have signed a snapshot.
#[derive(Debug, Clone, Args)]
pub(crate) struct VerifierArgs {
    /// Public key of the snapshot's signature, in PEM: a snapshot that it does not confirm is
    /// refused before anything of it is parsed [default: no signature is needed]
    #[arg(long, value_name = "FILE")]
    verify_key: Option<PathBuf>,
    #[command(flatten)]
    tenant: TenantArgs,
}

/// The key that signs a snapshot.
#[derive(Debug, Clone, Args)]
pub(crate) struct SignerArgs {
    /// Sign the snapshot with this Ed25519 key, in PEM, as `openssl genpkey -algorithm ed25519 -out
    /// FILE` makes it
    #[arg(long, value_name = "FILE")]
    signing_key: Option<PathBuf>,
}

/// The tenant that a snapshot is signed for.
#[derive(Debug, Clone, Args)]
pub(crate) struct TenantArgs {
    /// Tenant that a snapshot is signed for; the signature is valid for no other
    #[arg(long, value_name = "NAME", default_value = TENANT)]
    pub(crate) tenant: String,
}

impl VerifierArgs {
    /// The verifier, if there is one.
    pub(crate) fn verifier(&self) -> Result<Option<Verifier>, KeyError> {
        let key = self.verify_key.as_deref();
        key.map(|key| Verifier::read(key, self.tenant())).transpose()
    }

    /// The same as arguments of another command.
    pub(crate) fn as_arguments(&self) -> Vec<OsString> {
        let Some(key) = &self.verify_key else { return Vec::new() };
        vec!["--verify-key".into(), key.into(), "--tenant".into(), self.tenant().into()]
    }

    /// The tenant that a snapshot is signed for.
    pub(crate) fn tenant(&self) -> &str {
        &self.tenant.tenant
    }
}

impl SignerArgs {
    /// The signer, if there is one.
    pub(crate) fn signer(&self, tenant: &str) -> Result<Option<Signer>, KeyError> {
        self.signing_key.as_deref().map(|key| Signer::read(key, tenant)).transpose()
    }
}
