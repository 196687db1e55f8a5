//! Measures memory use and ends idle microVMs, once a second.

use std::sync::Arc;

use super::{Fleet, Idle, Locked};
use crate::instances::table::InstanceId;
use crate::instances::usage::{Usage, usage};

impl Fleet {
    /// Measures the microVMs, ends those that were idle for too long, and replaces standby
    /// monitors.
    pub(super) fn watch(self: &Arc<Self>) {
        // Reads a file of /proc for each microVM, so without holding the lock.
        let processes = self.state.lock().instances.processes();
        let measured: Vec<(InstanceId, Option<Usage>)> =
            processes.into_iter().map(|(id, process)| (id, self.usage(process))).collect();
        let mut state = self.lock();
        for (instance, usage) in measured {
            let Some(usage) = usage else { continue };
            if let Some(revision) = state.instances.measured(instance, usage) {
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

    /// The memory use of a microVM's process, and of its guest's disk.
    fn usage(&self, process: u32) -> Option<Usage> {
        let Usage { private, shared } = usage(process)?;
        let disk = self.launcher.scratch.bytes_of(process);
        Some(Usage { private: private.saturating_add(disk), shared })
    }

    /// Ends microVMs that were idle for too long or whose process has ended.
    fn end_idle(&self, locked: &mut Locked<'_>) {
        let (state, later) = locked.parts();
        for revision in state.revisions.values_mut() {
            let keep = |idle: &mut Idle| {
                idle.since.elapsed() < self.limits.keep_alive && idle.vm.microvm.is_alive()
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
