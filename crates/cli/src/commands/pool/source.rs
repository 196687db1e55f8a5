//! Access to a pool through its manager or its medium.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;

use firn_base::error_chain;
use firn_pool::{
    Access, ArenaFacts, Client, ClientError, Listing, MappedExtent, MappedMedium, MediumError,
    Pool, PoolReader, Problem, Refusal, VerifyReport,
};
use firn_run::Instances;
use firn_snapshot::check_extent;

/// The pool of a command.
#[derive(Debug, Args)]
pub(crate) struct PoolArgs {
    /// The pool: its medium (a devdax device or a file) or the socket of its manager
    #[arg(long = "pool", value_name = "PATH", env = "FIRN_POOL")]
    path: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// A pool: its manager, or its medium if no manager runs.
#[derive(Debug)]
pub(crate) enum Source {
    Manager(Client),
    Medium(PathBuf),
}

impl PoolArgs {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn source(&self) -> anyhow::Result<Source> {
        Ok(match Instances::of_user().managers().connect(&self.path)? {
            Some(manager) => Source::Manager(manager),
            None => Source::Medium(self.path.clone()),
        })
    }
}

impl Source {
    /// Opens the pool for reading, concurrently with its manager.
    pub(crate) fn reader(&mut self) -> anyhow::Result<PoolReader> {
        let medium = match self {
            Self::Manager(client) => {
                let described = client.describe()?;
                MappedMedium::from_descriptor(described.descriptor, described.medium)?
            }
            Self::Medium(path) => MappedMedium::open(path, Access::Read)?,
        };
        Ok(PoolReader::open(Arc::new(medium))?)
    }

    /// Checks the metadata and, if `content` is set, the content of each snapshot. With a manager,
    /// the snapshot is pinned during its check; on a medium it may change meanwhile.
    pub(crate) fn verify(&mut self, content: bool) -> anyhow::Result<VerifyReport> {
        let reader = self.reader()?;
        let facts = reader.medium().clone();
        match self {
            _ if !content => Ok(reader.verify(&mut |_, _| Ok(()))),
            Self::Medium(path) => {
                let file = File::open(&path)
                    .map_err(|source| MediumError::Open { path: path.clone(), source })?;
                let granule = reader.facts().granule;
                Ok(reader.verify(&mut |name, found| {
                    let medium = file.try_clone().map_err(|error| error.to_string())?;
                    let extent = MappedExtent::map(
                        medium.into(),
                        found.extent().offset,
                        found.extent(),
                        granule,
                        facts.durability,
                        Access::Read,
                    );
                    let extent = extent.map_err(|error| error_chain(&error))?;
                    check_extent(name, extent).map_err(|error| error_chain(&error))
                }))
            }
            Self::Manager(client) => {
                let mut names = Vec::new();
                let mut report = reader.verify(&mut |name, _| {
                    names.push(name.to_owned());
                    Ok(())
                });
                for name in names {
                    // A snapshot removed meanwhile is not a problem.
                    let grant = match client.snapshot(&name) {
                        Err(ClientError::Refused { refusal: Refusal::Unknown, .. }) => continue,
                        grant => grant?,
                    };
                    let checked = grant.map().map_err(|error| error_chain(&error));
                    let checked = checked.and_then(|extent| {
                        check_extent(&name, extent).map_err(|error| error_chain(&error))
                    });
                    if let Err(what) = checked {
                        report.problems.push(Problem::Content { name, what });
                    }
                    client.release(grant.extent().generation)?;
                }
                Ok(report)
            }
        }
    }

    /// The usage of the manager's copies.
    pub(crate) fn arena(&mut self) -> anyhow::Result<Option<ArenaFacts>> {
        Ok(match self {
            Self::Manager(client) => Some(client.arena()?),
            Self::Medium(_) => None,
        })
    }

    /// Lists all extents. A manager also reports pins.
    pub(crate) fn list(&mut self) -> anyhow::Result<Listing> {
        match self {
            Self::Manager(client) => Ok(client.list()?),
            Self::Medium(_) => Ok(self.reader()?.list()),
        }
    }
}

/// Opens the pool on a medium for changing it.
pub(crate) fn open(path: &Path) -> anyhow::Result<Pool> {
    Ok(Pool::open(Arc::new(MappedMedium::open(path, Access::Write)?))?)
}
