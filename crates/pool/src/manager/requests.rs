//! Handling of requests.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_base::{PageRange, error_chain};
use parking_lot::{Mutex, MutexGuard};

use super::copies::{Copies, Lent, StoredSet};
use super::error::Refusal;
use super::pace::Pace;
use super::replicas::{Acquired, Replicas};
use super::zeroing::Zeroing;
use super::{Granted, Request, Response};
use crate::extent::Extent;
use crate::media::Access;
use crate::pool::{
    AllocateError, LookupError, Pin, Pool, PublishError, ReclaimError, Replica, ReplicaError,
    Staging,
};
use crate::runs::{decode_runs, encode_runs};

/// Maximum number of grants of one connection.
const MAX_GRANTS: usize = 4096;
/// Maximum length of the key of a copy set, bytes.
const MAX_KEY: usize = 128;

/// A pool and its manager's state in memory.
#[derive(Debug)]
pub(super) struct Manager {
    pool: Pool,
    replicas: Replicas,
    copies: Copies,
    zeroing: Zeroing,
    pace: Arc<Pace>,
    /// Generations of the extents whose bytes a client has checked since the medium was opened.
    verified: Mutex<HashSet<u64>>,
}

/// The grants of a connection, by generation.
#[derive(Debug, Default)]
pub(super) struct Grants {
    pins: Vec<Pin>,
    stagings: HashMap<u64, Staging>,
    replicas: HashMap<u64, Replica>,
    copies: Vec<Lent>,
    confined: bool,
}

pub(super) type Answer = Result<(Response, Option<OwnedFd>), (Refusal, String)>;

impl Manager {
    pub(super) fn new(pool: Pool) -> io::Result<Self> {
        let pace = Arc::new(Pace::new());
        let replicas = Replicas::new(pool.clone(), Arc::clone(&pace))?;
        let copies = Copies::new(pool.clone(), Arc::clone(&pace));
        let zeroing = Zeroing::new(pool.clone(), Arc::clone(&pace))?;
        Ok(Self { replicas, copies, zeroing, pace, verified: Mutex::default(), pool })
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn copies(&self) -> &Copies {
        &self.copies
    }

    /// Releases the grants of a connection that ended.
    pub(super) fn take_back(&self, mut grants: Grants) {
        // The written pages are unknown.
        let replicas = std::mem::take(&mut grants.replicas).into_values();
        self.replicas.take_back(replicas.map(|replica| (replica, None)));
    }

    /// Forgets the checks of freed extents. Generations are never reused.
    fn forget_freed(&self) {
        let listing = self.pool.list();
        let held: HashSet<u64> =
            listing.extents.iter().map(|listed| listed.extent.generation).collect();
        self.verified().retain(|generation| held.contains(generation));
    }

    fn verified(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.verified.lock()
    }

    /// Handles one request of a connection that holds `grants`.
    pub(super) fn answer(&self, request: Request, grants: &mut Grants) -> Answer {
        if grants.confined && !request.is_confined() {
            let message = "this connection is confined to what it was granted";
            return Err((Refusal::Confined, message.to_owned()));
        }
        match request {
            Request::Describe => {
                let descriptor = self.descriptor(Access::Read)?;
                let (pool, medium) = (self.pool.facts(), self.pool.medium().clone());
                let (recovery, pid) = (self.pool.recovery(), std::process::id());
                let described = Response::Described { pool, medium, recovery, pid };
                Ok((described, Some(descriptor)))
            }
            Request::Snapshot { name } => {
                self.pace.start();
                grants.check_room()?;
                let pin = self.pool.pin(&name).map_err(refuse_lookup)?;
                let granted = self.granted(pin.extent());
                let descriptor = self.descriptor(Access::Read)?;
                grants.pins.push(pin);
                Ok((Response::Granted(granted), Some(descriptor)))
            }
            Request::Verified { generation } => {
                grants.pin(generation)?;
                self.verified().insert(generation);
                Ok((Response::Noted, None))
            }
            Request::IsCurrent { generation } => {
                self.pace.start();
                let current = self.pool.lookup(grants.pin(generation)?.name());
                let is_current = current.is_ok_and(|current| current.generation == generation);
                Ok((Response::Current(is_current), None))
            }
            Request::Confine => {
                grants.confined = true;
                Ok((Response::Noted, None))
            }
            Request::Replica { name } => self.replica(&name, grants),
            Request::Copy { generation, key } => {
                grants.check_room()?;
                let pin = match generation {
                    Some(generation) => grants.pin(generation)?,
                    None => grants.pins.last().ok_or_else(|| {
                        (Refusal::Invalid, "this connection has no snapshot".to_owned())
                    })?,
                };
                let Some(loan) = self.copies.lend(pin, &key) else {
                    return Ok((Response::NoCopySet, None));
                };
                let (copied, descriptor) = match loan.copy {
                    Ok(mut lent) => {
                        let (pages, descriptor) = (lent.pages, lent.file.take());
                        grants.copies.push(lent);
                        (Ok(pages), descriptor)
                    }
                    Err(reason) => (Err(reason), None),
                };
                Ok((Response::Copy { runs: encode_runs(&loan.runs), copied }, descriptor))
            }
            Request::CopySet { generation, key } => {
                let set = self.copies.set(grants.pin(generation)?, &key);
                let Some(StoredSet { revision, runs, state }) = set else {
                    return Ok((Response::NoCopySet, None));
                };
                Ok((Response::CopySet { revision, runs: encode_runs(&runs), state }, None))
            }
            Request::StoreCopySet { generation, key, revision, runs, state } => {
                let pin = grants.pin(generation)?;
                if key.len() > MAX_KEY {
                    let message = format!("the key of a copy set has at most {MAX_KEY} bytes");
                    return Err((Refusal::Invalid, message));
                }
                let runs = decode_runs(&runs);
                let stored = self.copies.replace(pin, &key, revision, runs, state);
                Ok((if stored { Response::Noted } else { Response::OtherRevision }, None))
            }
            Request::Begin { name, guest_bytes, tail_bytes } => {
                grants.check_room()?;
                let staging =
                    self.replicas.with_room(|| self.pool.allocate(&name, guest_bytes, tail_bytes));
                let staging = staging.map_err(refuse_allocate)?;
                let zeroed = staging.zeroed().into_iter().map(|part| (part.start, part.end));
                let zeroed = zeroed.collect();
                let granted = Granted { zeroed, ..self.granted(staging.extent()) };
                let descriptor = self.descriptor(Access::Write)?;
                grants.stagings.insert(staging.extent().generation, staging);
                Ok((Response::Granted(granted), Some(descriptor)))
            }
            Request::Commit { generation } => {
                let staging = grants.stagings.remove(&generation);
                let staging = staging.ok_or_else(|| not_held(generation))?;
                let extent = staging
                    .publish()
                    .map_err(|error: PublishError| (Refusal::Medium, error_chain(&error)))?;
                // Ready replicas and copies of an older generation are obsolete.
                self.replicas.drop_stale();
                self.forget_freed();
                self.copies.drop_stale();
                Ok((Response::Published { extent }, None))
            }
            Request::Release { generation } => {
                if let Some(replica) = grants.replicas.remove(&generation) {
                    self.replicas.take_back([(replica, None)]);
                } else if grants.stagings.remove(&generation).is_none() {
                    let held = |pin: &Pin| pin.extent().generation == generation;
                    let position = grants.pins.iter().position(held);
                    grants.pins.swap_remove(position.ok_or_else(|| not_held(generation))?);
                }
                Ok((Response::Released, None))
            }
            Request::GiveBack { generation, written } => {
                let written = written.into_iter().map(|(first, pages)| PageRange { first, pages });
                let replica = grants.replicas.remove(&generation);
                let replica = replica.ok_or_else(|| not_held(generation))?;
                self.replicas.take_back([(replica, Some(written.collect()))]);
                Ok((Response::Released, None))
            }
            Request::List => {
                let mut listing = self.pool.list();
                self.replicas.add_imaging(&mut listing);
                for listed in &mut listing.extents {
                    listed.learnt = self.copies.learnt(listed);
                }
                Ok((Response::Listing { listing, arena: self.copies.facts() }, None))
            }
            Request::Settle => {
                self.pace.without_pauses(|| {
                    self.replicas.settle();
                    self.copies.settle();
                    self.zeroing.settle();
                });
                Ok((Response::Noted, None))
            }
            Request::Reclaim { name } => {
                // A ready replica pins its snapshot.
                self.replicas.free(Some(&name));
                let bytes = self.pool.reclaim(&name).map_err(|error| match error {
                    ReclaimError::Lookup(error) => refuse_lookup(error),
                    error => (Refusal::Medium, error_chain(&error)),
                })?;
                self.forget_freed();
                self.copies.drop_stale();
                Ok((Response::Reclaimed { bytes }, None))
            }
            Request::Collect => {
                let replicas = self.replicas.free(None);
                self.copies.drop_all();
                let slots =
                    self.pool.gc().map_err(|error| (Refusal::Medium, error_chain(&error)))?;
                self.forget_freed();
                Ok((Response::Collected { slots, replicas }, None))
            }
        }
    }

    fn replica(&self, name: &str, grants: &mut Grants) -> Answer {
        self.pace.start();
        grants.check_room()?;
        let acquired = self.replicas.get(name).map_err(|error| match error {
            ReplicaError::Lookup(error) => refuse_lookup(error),
            ReplicaError::Allocate(error) => refuse_allocate(error),
        })?;
        let Acquired { replica, imaging, prepared } = acquired;
        let granted = self.granted(replica.extent());
        let source = replica.source().extent();
        let descriptor = self.descriptor(Access::Write)?;
        grants.replicas.insert(replica.extent().generation, replica);
        Ok((Response::Replica { granted, source, imaging, prepared }, Some(descriptor)))
    }

    fn granted(&self, extent: Extent) -> Granted {
        let facts = self.pool.facts();
        let medium = self.pool.medium();
        Granted {
            pool: facts.uuid,
            granule: facts.granule,
            durability: medium.durability,
            leaf: medium.leaf(),
            private_mappings: medium.has_private_mappings(),
            verified: self.verified().contains(&extent.generation),
            extent,
            zeroed: Vec::new(),
        }
    }

    fn descriptor(&self, access: Access) -> Result<OwnedFd, (Refusal, String)> {
        let descriptor = self.pool.shared_medium().descriptor(access);
        descriptor.map_err(|error| {
            let medium = &self.pool.medium().name;
            (Refusal::Medium, format!("cannot open {medium} for a client: {error}"))
        })
    }
}

impl Grants {
    fn pin(&self, generation: u64) -> Result<&Pin, (Refusal, String)> {
        let held = |pin: &&Pin| pin.extent().generation == generation;
        self.pins.iter().find(held).ok_or_else(|| not_held(generation))
    }

    fn check_room(&self) -> Result<(), (Refusal, String)> {
        let held = self.pins.len() + self.stagings.len() + self.replicas.len() + self.copies.len();
        if held < MAX_GRANTS {
            return Ok(());
        }
        let message = format!("a connection holds at most {MAX_GRANTS} extents: release some");
        Err((Refusal::Invalid, message))
    }
}

fn not_held(generation: u64) -> (Refusal, String) {
    (Refusal::Invalid, format!("this connection has no grant of generation {generation}"))
}

#[expect(clippy::needless_pass_by_value, reason = "as map_err has it")]
fn refuse_lookup(error: LookupError) -> (Refusal, String) {
    let refusal = match &error {
        LookupError::Unknown(_) => Refusal::Unknown,
        LookupError::BeingWritten(_) => Refusal::BeingWritten,
    };
    (refusal, error_chain(&error))
}

#[expect(clippy::needless_pass_by_value, reason = "as map_err has it")]
fn refuse_allocate(error: AllocateError) -> (Refusal, String) {
    let refusal = match &error {
        AllocateError::Name { .. } | AllocateError::GuestBytes(_) => Refusal::Invalid,
        AllocateError::BeingWritten(_) => Refusal::BeingWritten,
        AllocateError::TableFull { .. } | AllocateError::Full { .. } => Refusal::Full,
        AllocateError::Medium(_) => Refusal::Medium,
    };
    (refusal, error_chain(&error))
}
