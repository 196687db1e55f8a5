//! Standby monitors: processes that have KVM open, and, for a thaw that is likely, its VM made.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use firn_run::StartError;
use firn_run::monitor::Monitor;
use firn_vmm::Shape;
use parking_lot::Mutex;

use super::launcher::Resources;
use crate::functions::SnapshotPlace;

/// The standby monitors.
#[derive(Debug)]
pub(crate) struct Standbys {
    /// The number to keep.
    count: usize,
    state: Mutex<State>,
    /// Held while monitors are started and prepared: one thread at a time. `state` is not, so that
    /// requests and the status never wait for a process.
    filling: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    ready: Vec<Standby>,
    /// The last thaws, newest first, as many as there are monitors: the next ones are likely to be
    /// of the same shapes.
    thaws: VecDeque<ThawKey>,
    /// The shapes of some of these.
    shapes: Vec<(ThawKey, Arc<Shape>)>,
    closed: bool,
}

#[derive(Debug)]
struct Standby {
    monitor: Monitor,
    /// What it has made.
    shape: Option<Arc<Shape>>,
}

/// What decides the shape of a thaw's microVM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ThawKey {
    pub(crate) place: SnapshotPlace,
    /// The owner of its function: the tenant that it is signed for.
    pub(crate) owner: Option<String>,
    pub(crate) planner: String,
    /// The root disk.
    pub(crate) root: PathBuf,
    /// Limit of what the guest writes to its disk, bytes.
    pub(crate) disk: u64,
    /// Whether the guest has a network device.
    pub(crate) network: bool,
}

impl ThawKey {
    /// What a microVM that is thawed by this gets of its host.
    pub(super) fn resources(&self) -> Resources {
        Resources { disk: self.disk, network: self.network }
    }

    /// Now, if a microVM that is thawed by this becomes a client of the pool.
    pub(super) fn client_since(&self) -> Option<Instant> {
        matches!(self.place, SnapshotPlace::Pool(_)).then(Instant::now)
    }
}

/// How monitors are started and prepared.
pub(crate) trait Prepare {
    /// Starts a monitor.
    fn spawn(&self) -> Result<Monitor, StartError>;

    /// Finds out the shape of a thaw's microVM; `None` where that fails, as the thaw would.
    fn shape(&self, key: &ThawKey) -> Option<Shape>;

    /// The socket of the pool's manager, for a thaw from the pool.
    fn pool(&self) -> Option<PathBuf>;
}

impl Standbys {
    /// No monitors yet; [`Standbys::fill`] starts `count`.
    pub(crate) fn new(count: usize) -> Self {
        Self { count, state: Mutex::default(), filling: Mutex::default() }
    }

    /// Takes a monitor that runs for a thaw, one that has made its VM if there is one.
    pub(super) fn take(&self, key: &ThawKey) -> Option<Monitor> {
        let mut state = self.state.lock();
        state.thaws.push_front(key.clone());
        state.thaws.truncate(self.count);
        let shape = state.shape(key);
        state.ready.retain_mut(|standby| standby.monitor.is_alive());
        let fits = |standby: &Standby| shape.is_some() && standby.shape == shape;
        let plain = |standby: &Standby| standby.shape.is_none();
        let ready = &state.ready;
        let at = ready.iter().position(fits).or_else(|| ready.iter().position(plain));
        let at = at.or_else(|| ready.len().checked_sub(1))?;
        Some(state.ready.swap_remove(at).monitor)
    }

    /// Starts monitors until there are enough, and prepares them for the thaws that are likely.
    /// Returns at once if another thread does that.
    pub(super) fn fill(&self, prepare: &impl Prepare) {
        let Some(_filling) = self.filling.try_lock() else { return };
        self.learn_shapes(prepare);
        let (missing, mut spare, ended) = self.state.lock().compare(self.count);
        // Waits for processes to end.
        drop(ended);
        if missing.is_empty() {
            return;
        }
        let pool = prepare.pool();
        for shape in missing {
            let monitor = match spare.pop() {
                Some(monitor) => Ok(monitor),
                None => prepare.spawn(),
            };
            let prepared = monitor.and_then(|monitor| stand_by(monitor, shape, pool.as_deref()));
            match prepared {
                Ok(standby) => {
                    let mut state = self.state.lock();
                    if state.closed {
                        drop(state);
                        return;
                    }
                    state.ready.push(standby);
                }
                Err(error) => {
                    // The next thaw starts its own monitor.
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(error, "cannot start a standby monitor");
                    return;
                }
            }
        }
    }

    /// Finds out the shapes of the last thaws, and forgets those of older ones.
    fn learn_shapes(&self, prepare: &impl Prepare) {
        let unknown: Vec<ThawKey> = {
            let mut state = self.state.lock();
            let State { thaws, shapes, .. } = &mut *state;
            shapes.retain(|(key, _)| thaws.contains(key));
            let is_known = |key: &&ThawKey| shapes.iter().any(|(known, _)| known == *key);
            let mut unknown: Vec<ThawKey> = Vec::new();
            for key in thaws.iter().filter(|key| !is_known(key)) {
                if !unknown.contains(key) {
                    unknown.push(key.clone());
                }
            }
            unknown
        };
        for key in unknown {
            let shape = prepare.shape(&key);
            let mut state = self.state.lock();
            match shape {
                Some(shape) => state.shapes.push((key, Arc::new(shape))),
                None => state.thaws.retain(|thaw| *thaw != key),
            }
        }
    }

    /// Ends the monitors that are clients of the pool. Waits for them.
    pub(super) fn end_pool_clients(&self) {
        let is_client = |standby: &mut Standby| standby.monitor.has_manager();
        let ended: Vec<_> = self.state.lock().ready.extract_if(.., is_client).collect();
        drop(ended);
    }

    /// Ends all monitors; no more are kept.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let ended = std::mem::take(&mut state.ready);
        drop(state);
        // Waits for processes to end.
        drop(ended);
    }

    /// The number of monitors.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().ready.len()
    }
}

impl State {
    /// What is missing of `count` monitors, the monitors that can be prepared for it, and those
    /// that have ended. Monitors that are prepared for a thaw that is not likely any more are
    /// prepared again.
    fn compare(&mut self, count: usize) -> (Vec<Option<Arc<Shape>>>, Vec<Monitor>, Vec<Standby>) {
        let ended =
            self.ready.extract_if(.., |standby| !standby.monitor.is_alive()).collect::<Vec<_>>();
        let mut spare = std::mem::take(&mut self.ready);
        let mut missing = Vec::new();
        if !self.closed {
            for shape in self.wanted(count) {
                match spare.iter().position(|standby| standby.shape == shape) {
                    Some(at) => self.ready.push(spare.swap_remove(at)),
                    None => missing.push(shape),
                }
            }
        }
        (missing, spare.into_iter().map(|standby| standby.monitor).collect(), ended)
    }

    fn shape(&self, key: &ThawKey) -> Option<Arc<Shape>> {
        self.shapes.iter().find(|(known, _)| known == key).map(|(_, shape)| shape.clone())
    }

    /// What `count` monitors should have made: a shape that more of the last thaws had is made more
    /// often.
    fn wanted(&self, count: usize) -> Vec<Option<Arc<Shape>>> {
        if self.thaws.is_empty() {
            return vec![None; count];
        }
        self.thaws.iter().cycle().take(count).map(|key| self.shape(key)).collect()
    }
}

/// Has a monitor make a VM of a shape.
fn stand_by(
    mut monitor: Monitor,
    shape: Option<Arc<Shape>>,
    pool: Option<&Path>,
) -> Result<Standby, StartError> {
    if let Some(shape) = &shape {
        monitor.stand_by(shape, pool)?;
    }
    Ok(Standby { monitor, shape })
}

#[cfg(test)]
#[path = "standby_tests.rs"]
mod tests;
