//! Handling of requests.
//!
//! A confined connection is one of a monitor, which its guest may have taken over:
//!
//! | request | what a hostile client gains |
//! |---|---|
//! | `release` | nothing: the space of the grant is used again when no process has it mapped |
//! | `is_current` | a pause of background work, once |
//! | `copy_set` | the prediction of its own snapshot |
//! | `store_copy_set` | a false prediction for its own snapshot, of limited size, once |
//! | `confine` | nothing |
//!
//! The number and the size of its requests are limited, so that they cost the manager little time.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_base::error_chain;
use parking_lot::{Mutex, MutexGuard};

use super::copies::{Copies, Lent, StoredSet};
use super::error::Refusal;
use super::pace::Pace;
use super::replicas::{Acquired, Replicas};
use super::wire::MAX_REQUEST;
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
/// Maximum size of a copy set, its runs and the client's state, bytes. A copy of more runs would
/// take more mappings than a process can have.
const MAX_SET: usize = 256 << 10;
/// Maximum number of requests of a confined connection. A run needs a few; many runs that end at
/// once may try several times to store what they learnt.
const MAX_CONFINED: u32 = 256;
/// Maximum size of such a request, bytes: that of the largest copy set as JSON.
const MAX_CONFINED_BYTES: u32 = 2 << 20;

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
    /// Whether what was requested for a start of the last snapshot was not there, or the snapshot
    /// was granted before its bytes were verified.
    misses: bool,
    confined: Option<Confined>,
}

/// What a confined connection has used up.
#[derive(Debug, Default)]
struct Confined {
    requests: u32,
    started: bool,
    learnt: bool,
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
        let replicas = std::mem::take(&mut grants.replicas);
        drop(grants);
        self.replicas.take_back(replicas.into_values());
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
        if let Some(confined) = &mut grants.confined {
            confined.requests += 1;
            if confined.requests > MAX_CONFINED || !request.is_confined() {
                let message = "this connection is confined to what it was granted";
                return Err((Refusal::Confined, message.to_owned()));
            }
        }
        match request {
            Request::Describe => {
                let descriptor = self.pool.shared_medium().descriptor(Access::Read);
                let descriptor = descriptor.map_err(|error| self.refuse_descriptor(&error))?;
                let (pool, medium) = (self.pool.facts(), self.pool.medium().clone());
                let (recovery, pid) = (self.pool.recovery(), std::process::id());
                let described = Response::Described { pool, medium, recovery, pid };
                Ok((described, Some(descriptor)))
            }
            Request::Snapshot { name } => {
                self.pace.start();
                grants.check_room()?;
                let pin = self.pool.pin(&name).map_err(refuse_lookup)?;
                let (granted, descriptor) = self.grant(pin.extent(), Access::Read)?;
                grants.pins.push(pin);
                // Another connection may report that they are before this one is confined.
                grants.misses = !granted.verified;
                Ok((Response::Granted(granted), Some(descriptor)))
            }
            Request::Verified { generation } => {
                grants.pin(generation)?;
                self.verified().insert(generation);
                Ok((Response::Noted, None))
            }
            Request::IsCurrent { generation } => {
                if grants
                    .confined
                    .as_mut()
                    .is_none_or(|it| !std::mem::replace(&mut it.started, true))
                {
                    self.pace.start();
                }
                let current = self.pool.lookup(grants.pin(generation)?.name());
                let is_current = current.is_ok_and(|current| current.generation == generation);
                Ok((Response::Current(is_current), None))
            }
            Request::Confine => {
                grants.confined.get_or_insert_default();
                Ok((Response::Noted, None))
            }
            Request::ConfineForStart => {
                if !grants.pins.is_empty() && !grants.misses {
                    grants.confined.get_or_insert_default();
                }
                Ok((Response::Confined(grants.confined.is_some()), None))
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
                    grants.misses = true;
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
                if size_of_val(runs.as_slice()) + state.len() > MAX_SET {
                    let message = format!("a copy set has at most {MAX_SET} bytes");
                    return Err((Refusal::Invalid, message));
                }
                if grants.confined.as_ref().is_some_and(|confined| confined.learnt) {
                    let message = "this connection has stored a copy set";
                    return Err((Refusal::Confined, message.to_owned()));
                }
                let runs = decode_runs(&runs);
                let stored = self.copies.replace(pin, &key, revision, runs, state);
                if let Some(confined) = &mut grants.confined {
                    confined.learnt = stored;
                }
                Ok((if stored { Response::Noted } else { Response::OtherRevision }, None))
            }
            Request::Begin { name, guest_bytes, tail_bytes } => {
                grants.check_room()?;
                let staging =
                    self.replicas.with_room(|| self.pool.allocate(&name, guest_bytes, tail_bytes));
                let staging = staging.map_err(refuse_allocate)?;
                let zeroed = staging.zeroed().into_iter().map(|part| (part.start, part.end));
                let zeroed = zeroed.collect();
                let (granted, descriptor) = self.grant(staging.extent(), Access::Write)?;
                let granted = Granted { zeroed, ..granted };
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
                let replica = grants.replicas.remove(&generation);
                if replica.is_none() && grants.stagings.remove(&generation).is_none() {
                    let held = |pin: &Pin| pin.extent().generation == generation;
                    let position = grants.pins.iter().position(held);
                    grants.pins.swap_remove(position.ok_or_else(|| not_held(generation))?);
                }
                self.replicas.take_back(replica);
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
        let misses = std::mem::replace(&mut grants.misses, true);
        grants.check_room()?;
        let acquired = self.replicas.get(name).map_err(|error| match error {
            ReplicaError::Lookup(error) => refuse_lookup(error),
            ReplicaError::Allocate(error) => refuse_allocate(error),
        })?;
        let Acquired { replica, imaging, prepared } = acquired;
        let (granted, descriptor) = self.grant(replica.extent(), Access::Write)?;
        let source = replica.source().extent();
        let sealed = grants.pins.last().map(|pin| pin.extent().generation);
        grants.misses = misses || sealed != Some(source.generation);
        grants.replicas.insert(replica.extent().generation, replica);
        Ok((Response::Replica { granted, source, imaging, prepared }, Some(descriptor)))
    }

    fn grant(
        &self,
        extent: Extent,
        access: Access,
    ) -> Result<(Granted, OwnedFd), (Refusal, String)> {
        let opened = self.pool.shared_medium().grant(access, extent.offset);
        let opened = opened.map_err(|error| self.refuse_descriptor(&error))?;
        let facts = self.pool.facts();
        let medium = self.pool.medium();
        let granted = Granted {
            pool: facts.uuid,
            granule: facts.granule,
            durability: medium.durability,
            leaf: opened.leaf,
            private_mappings: medium.has_private_mappings(),
            verified: self.verified().contains(&extent.generation),
            extent,
            begin: opened.offset,
            zeroed: Vec::new(),
        };
        Ok((granted, opened.descriptor))
    }

    fn refuse_descriptor(&self, error: &io::Error) -> (Refusal, String) {
        let medium = &self.pool.medium().name;
        (Refusal::Medium, format!("cannot open {medium} for a client: {error}"))
    }
}

impl Grants {
    /// Maximum size of the next request, bytes; `None` if the connection has used up its requests.
    pub(super) fn max_request(&self) -> Option<u32> {
        match &self.confined {
            None => Some(MAX_REQUEST),
            Some(confined) => (confined.requests <= MAX_CONFINED).then_some(MAX_CONFINED_BYTES),
        }
    }

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
        AllocateError::TableFull { .. }
        | AllocateError::Full { .. }
        | AllocateError::NoMemory { .. } => Refusal::Full,
        AllocateError::Medium(_) => Refusal::Medium,
    };
    (refusal, error_chain(&error))
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
