//! Which snapshot a command is about: a directory, or a name in a pool.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};

use firn_run::{Descriptors, OpenedFile, PoolManager, Source, SourceSpec, set_pooled_profile};
use firn_snapshot::{Checks, Destination, KeyError, Profile, Signer, Verify, sign};

use crate::output;
use crate::pool_at;
use crate::signature_args::{SignerArgs, VerifierArgs};

/// A snapshot.
#[derive(Debug, Clone, Args)]
pub(crate) struct SnapshotArgs {
    /// Directory of the snapshot, or its name where --pool is given
    snapshot: PathBuf,
    /// The pool that the snapshot is in: its medium, whose manager is started where none runs, or
    /// its manager's socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    /// When the bytes of a snapshot are checked: at each thaw, once for each opening of a pool's
    /// medium, or never [default: once; without --pool never, and `always` reads all that the
    /// planner maps unchecked]
    #[arg(long)]
    verify: Option<VerifyArg>,
    #[command(flatten)]
    signed: VerifierArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum VerifyArg {
    Always,
    Once,
    Never,
}

impl From<VerifyArg> for Verify {
    fn from(argument: VerifyArg) -> Self {
        match argument {
            VerifyArg::Always => Self::Always,
            VerifyArg::Once => Self::Once,
            VerifyArg::Never => Self::Never,
        }
    }
}

impl SnapshotArgs {
    /// The planner where none is named: the best one for a snapshot without a profile.
    pub(crate) fn default_planner(&self) -> &'static str {
        if self.pool.is_some() { "firn" } else { "firecracker" }
    }

    /// What signs the snapshot once it is changed.
    pub(crate) fn signer(&self, signing: &SignerArgs) -> Result<Option<Signer>, KeyError> {
        signing.signer(self.signed.tenant())
    }

    fn when(&self) -> VerifyArg {
        self.verify.unwrap_or(VerifyArg::Once)
    }

    /// The snapshot for a start, and its root disk, if it has one: at `moved`, or where the
    /// manifest names it.
    pub(crate) fn source(
        &self,
        moved: Option<&Path>,
        descriptors: &mut Descriptors,
    ) -> anyhow::Result<(SourceSpec, Option<OpenedFile>)> {
        let moved = moved.map(|path| OpenedFile::open(path, descriptors)).transpose()?;
        let verifier = self.signed.verifier()?;
        let (source, root) = match &self.pool {
            None => {
                let path = &self.snapshot;
                let (source, root) = match moved {
                    Some(root) => (SourceSpec::directory(path, descriptors)?, Some(root)),
                    None => SourceSpec::directory_with_root(path, verifier.as_ref(), descriptors)?,
                };
                match self.verify {
                    Some(VerifyArg::Always) => (source.verified(), root),
                    Some(VerifyArg::Never) | None => (source, root),
                    Some(VerifyArg::Once) => {
                        bail!("--verify once needs --pool: pass --verify always")
                    }
                }
            }
            Some(pool) => {
                let pool = pool_at::open(pool)?;
                let (socket, name) = (pool.socket(), name(&self.snapshot)?);
                let (when, verifier) = (self.when().into(), verifier.as_ref());
                match moved {
                    Some(root) => (SourceSpec::pool(socket, name, when, descriptors)?, Some(root)),
                    None => SourceSpec::pool_with_root(socket, name, when, verifier, descriptors)?,
                }
            }
        };
        Ok(match verifier {
            Some(verifier) => (source.signed(verifier), root),
            None => (source, root),
        })
    }

    /// Opens the snapshot to look at it; of a pool, its sealed extent.
    pub(crate) fn open(&self) -> anyhow::Result<Source> {
        let verifier = self.signed.verifier()?;
        let Some(pool) = &self.pool else {
            return Ok(Source::open_signed(&self.snapshot, verifier.as_ref())?);
        };
        let pool = pool_at::open(pool)?;
        let checks = Checks { bytes: self.when().into(), signature: verifier.as_ref() };
        Ok(Source::open_sealed(pool.socket(), name(&self.snapshot)?, checks)?)
    }
}

impl SnapshotArgs {
    /// Puts a profile into the snapshot. In a pool, that takes a second extent until the first is
    /// not used any more. The snapshot is signed again if there is a signer.
    pub(crate) fn set_profile(
        &self,
        profile: &Profile,
        signer: Option<&Signer>,
    ) -> anyhow::Result<()> {
        let Some(pool) = &self.pool else {
            firn_snapshot::set_profile(&self.snapshot, profile)?;
            return Ok(signer.map_or(Ok(()), |signer| sign(&self.snapshot, signer))?);
        };
        let pool = pool_at::open(pool)?;
        let (name, verifier) = (name(&self.snapshot)?, self.signed.verifier()?);
        let note = set_pooled_profile(pool.socket(), name, profile, verifier.as_ref(), signer)?;
        if let Some(note) = note {
            output::note(&format!("firn: {note}"));
        }
        Ok(())
    }
}

/// Where a snapshot goes: the directory `to`, or that name in the pool.
pub(crate) fn destination(pool: Option<&PoolManager>, to: &Path) -> anyhow::Result<Destination> {
    let Some(pool) = pool else { return Ok(Destination::Directory(to.to_owned())) };
    Ok(Destination::Pool { socket: pool.socket().to_owned(), name: name(to)?.to_owned() })
}

/// The name of a snapshot in a pool.
pub(crate) fn name(argument: &Path) -> anyhow::Result<&str> {
    argument.to_str().with_context(|| {
        format!("{} cannot name a snapshot in a pool: it is not UTF-8", argument.display())
    })
}
