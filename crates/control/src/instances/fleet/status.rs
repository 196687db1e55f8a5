//! Collects the status document.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::Fleet;
use crate::instances::status::{DaemonStatus, MemoryStatus, MonitorsStatus, VersionStatus};
use crate::instances::table::Phase;

impl Fleet {
    /// The current status.
    pub(crate) fn status(&self) -> DaemonStatus {
        let state = self.state.lock();
        let mut versions: BTreeMap<(&str, &str, Uuid), VersionStatus> = BTreeMap::new();
        for record in state.instances.iter() {
            let key = (record.function.as_str(), record.version.as_str(), record.revision);
            let status = versions.entry(key).or_insert_with(|| VersionStatus::new(key.0, key.1));
            *match record.phase {
                Phase::Starting => &mut status.starting,
                Phase::Publishing => &mut status.publishing,
                Phase::Busy => &mut status.busy,
                Phase::Idle => &mut status.idle,
                Phase::Ending => &mut status.ending,
            } += 1;
            status.private += record.usage.private;
            status.shared = status.shared.max(record.usage.shared);
        }
        for (revision, stats) in state.stats.iter() {
            let key = (stats.function.as_str(), stats.version.as_str(), *revision);
            let status = versions.entry(key).or_insert_with(|| VersionStatus::new(key.0, key.1));
            let counts = stats.counts;
            status.requests = counts.requests;
            status.function_errors = counts.function_errors;
            status.throttled = counts.throttled;
            status.failed = counts.failed;
            (status.cold, status.thawed, status.warm) = (counts.cold, counts.thawed, counts.warm);
            status.latency = stats.latencies();
        }
        let versions: Vec<VersionStatus> = versions.into_values().collect();
        DaemonStatus {
            uptime_ns: u64::try_from(self.started_at.elapsed().as_nanos()).unwrap_or(u64::MAX),
            memory: MemoryStatus {
                limit: self.limits.memory,
                private_reserved: state.ledger.private_bytes(),
                shared_reserved: state.ledger.shared_bytes(),
                private: versions.iter().map(|version| version.private).sum(),
                shared: versions.iter().map(|version| version.shared).sum(),
            },
            monitors: MonitorsStatus {
                limit: self.limits.monitors,
                running: state.ledger.monitors(),
                standby: self.launcher.standbys.len(),
            },
            queued: state.waiting.len(),
            versions,
        }
    }
}
