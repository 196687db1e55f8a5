//! A record for each microVM that has a reservation: its version, phase and memory use.

use std::collections::HashMap;

use uuid::Uuid;

use super::usage::Usage;
use crate::functions::Version;

/// Identifies a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct InstanceId(u64);

/// The records.
#[derive(Debug, Default)]
pub(super) struct InstanceTable {
    next: u64,
    records: HashMap<InstanceId, InstanceRecord>,
}

/// One microVM.
#[derive(Debug)]
pub(super) struct InstanceRecord {
    pub(super) function: String,
    pub(super) version: String,
    pub(super) revision: Uuid,
    pub(super) phase: Phase,
    /// Its process, from the first request until the daemon ends the microVM.
    process: Option<u32>,
    /// Whether it has served a request, which touches most of the pages that later requests
    /// touch.
    answered: bool,
    pub(super) usage: Usage,
}

/// What a microVM does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It boots or thaws, or initialises the function.
    Starting,
    /// It boots, to be frozen.
    Publishing,
    /// It serves a request.
    Busy,
    /// It waits for a request.
    Idle,
    /// It ends.
    Ending,
}

impl InstanceTable {
    /// Adds a microVM of `version` that starts.
    pub(super) fn add(&mut self, version: &Version) -> InstanceId {
        let id = InstanceId(self.next);
        self.next += 1;
        let record = InstanceRecord {
            function: version.function.clone(),
            version: version.version.clone(),
            revision: version.revision,
            phase: Phase::Starting,
            process: None,
            answered: false,
            usage: Usage::default(),
        };
        self.records.insert(id, record);
        id
    }

    pub(super) fn remove(&mut self, id: InstanceId) {
        self.records.remove(&id);
    }

    /// The microVM has started and serves its first request.
    pub(super) fn started(&mut self, id: InstanceId, process: Option<u32>) {
        self.change(id, |record| (record.process, record.phase) = (process, Phase::Busy));
    }

    /// The microVM has started, before there is a request for it.
    pub(super) fn initialised(&mut self, id: InstanceId, process: Option<u32>) {
        self.change(id, |record| record.process = process);
    }

    /// The microVM boots to be frozen.
    pub(super) fn publishing(&mut self, id: InstanceId) {
        self.change(id, |record| record.phase = Phase::Publishing);
    }

    /// The microVM serves a request.
    pub(super) fn busy(&mut self, id: InstanceId) {
        self.change(id, |record| record.phase = Phase::Busy);
    }

    /// The microVM waits for a request.
    pub(super) fn idle(&mut self, id: InstanceId) {
        self.change(id, |record| {
            record.answered |= record.phase == Phase::Busy;
            record.phase = Phase::Idle;
        });
    }

    /// The daemon ends the microVM. Its process id is dropped, because the kernel reuses it.
    pub(super) fn ending(&mut self, id: InstanceId) {
        self.change(id, |record| (record.phase, record.process) = (Phase::Ending, None));
    }

    /// Stores the measured memory use. Returns the revision if the measurement is representative:
    /// the microVM still runs and has answered a request.
    pub(super) fn measured(&mut self, id: InstanceId, usage: Usage) -> Option<Uuid> {
        let record = self.records.get_mut(&id)?;
        record.usage = usage;
        Some(record.revision).filter(|_| record.answered && record.process.is_some())
    }

    /// The number of a revision's microVMs in a phase.
    pub(super) fn count(&self, revision: Uuid, phase: Phase) -> usize {
        self.iter().filter(|record| record.revision == revision && record.phase == phase).count()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &InstanceRecord> {
        self.records.values()
    }

    /// The processes to measure.
    pub(super) fn processes(&self) -> Vec<(InstanceId, u32)> {
        let process = |(id, record): (&InstanceId, &InstanceRecord)| Some((*id, record.process?));
        self.records.iter().filter_map(process).collect()
    }

    fn change(&mut self, id: InstanceId, change: impl FnOnce(&mut InstanceRecord)) {
        self.records.get_mut(&id).map(change);
    }
}
