//! Provisioned concurrency: microVMs that stay initialised, however long they are idle.

use std::collections::HashMap;

use uuid::Uuid;

use super::{Fleet, State};
use crate::instances::table::{InstanceTable, Phase};

/// How many microVMs of each revision stay initialised.
#[derive(Debug, Default)]
pub(super) struct Provisioned(HashMap<Uuid, usize>);

impl Provisioned {
    /// How many idle microVMs of a revision can end.
    pub(super) fn spare(&self, revision: Uuid, idle: usize, instances: &InstanceTable) -> usize {
        match self.0.get(&revision) {
            Some(wanted) => {
                let busy = instances.count(revision, Phase::Busy);
                (idle + busy).saturating_sub(*wanted).min(idle)
            }
            None => idle,
        }
    }

    /// Lets all microVMs of a revision end.
    pub(super) fn forget(&mut self, revision: Uuid) {
        self.0.remove(&revision);
    }
}

impl State {
    /// How many microVMs of a revision are idle or serve a request.
    fn initialised(&self, revision: Uuid) -> usize {
        let idle = self.revisions.get(&revision).map_or(0, |revision| revision.idle.len());
        idle + self.instances.count(revision, Phase::Busy)
    }
}

impl Fleet {
    /// Sets how many microVMs of each revision stay initialised once they are; of other revisions
    /// none does.
    pub(crate) fn keep_initialised(&self, wanted: HashMap<Uuid, usize>) {
        self.state.lock().provisioned = Provisioned(wanted);
    }

    /// How many microVMs of a revision are initialised.
    pub(crate) fn initialised(&self, revision: Uuid) -> usize {
        self.state.lock().initialised(revision)
    }

    /// How many microVMs of a revision have to start, so that as many are initialised as should be;
    /// `None` if none has to be.
    pub(crate) fn missing(&self, revision: Uuid) -> Option<usize> {
        let state = self.state.lock();
        let wanted = *state.provisioned.0.get(&revision)?;
        let starting = state.instances.count(revision, Phase::Starting);
        Some(wanted.saturating_sub(state.initialised(revision) + starting))
    }
}

#[cfg(test)]
#[path = "provisioned_tests.rs"]
mod tests;
