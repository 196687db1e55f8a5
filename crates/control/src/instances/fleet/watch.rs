//! Measures memory use and ends idle microVMs, once a second.

use std::sync::Arc;

use super::{Fleet, Idle, Locked, State};
use crate::instances::table::InstanceId;
use crate::instances::usage::{Usage, usage};

impl Fleet {
    /// Measures the microVMs, ends those that were idle for too long, and replaces standby
    /// monitors.
    pub(super) fn watch(self: &Arc<Self>) {
        // Reads a file of /proc for each microVM, so without holding the lock.
        let processes = self.state.lock().instances.processes();
        let measured: Vec<(InstanceId, Usage, u64)> = processes
            .into_iter()
            .filter_map(|(id, process)| {
                Some((id, usage(process)?, self.launcher.scratch.bytes_of(process)))
            })
            .collect();
        let mut state = self.lock();
        for (instance, usage, disk) in measured {
            let with_disk = Usage { private: usage.private.saturating_add(disk), ..usage };
            if let Some(revision) = state.instances.measured(instance, with_disk) {
                // The disk is reserved in full.
                state.ledger.record_usage(revision, usage);
            }
        }
        self.end_idle(&mut state);
        if state.ledger.is_over() {
            self.make_room(&mut state);
        }
        state.stats.sweep();
        self.update_gauges(&state);
        let closed = state.closed;
        drop(state);
        // A measurement can lower the reservations of a revision.
        self.dispatch();
        if !closed {
            self.stand_by();
        }
    }

    /// Ends microVMs that were idle for too long or whose process has ended.
    fn end_idle(&self, locked: &mut Locked<'_>) {
        let (state, later) = locked.parts();
        let State { revisions, provisioned, instances, .. } = state;
        for (id, revision) in revisions {
            let mut spare = provisioned.spare(*id, revision.idle.len(), instances);
            let mut keep = |idle: &mut Idle| {
                let is_over = spare > 0 && idle.since.elapsed() >= self.limits.keep_alive;
                let keeps = !is_over && idle.vm.microvm.is_alive();
                spare = spare.saturating_sub(usize::from(!keeps));
                keeps
            };
            let (kept, over) = std::mem::take(&mut revision.idle)
                .into_iter()
                .map(|mut idle| (keep(&mut idle), idle))
                .partition::<Vec<_>, _>(|(keep, _)| *keep);
            revision.idle = kept.into_iter().map(|(_, idle)| idle).collect();
            for (_, idle) in over {
                later.end(idle.vm);
            }
        }
    }
}
