//! What a daemon holds.

use std::path::Path;

use crate::{Daemon, World};

/// The allocator's and the log's sizes vary, bytes.
const SLACK: u64 = 2 << 20;

/// The resources of a daemon.
#[derive(Debug)]
pub struct Resources {
    processes: usize,
    descriptors: usize,
    /// Anonymous memory, bytes.
    memory: u64,
    files: Vec<String>,
}

impl Resources {
    /// What the daemon and its processes hold now.
    pub fn of(world: &World, daemon: &Daemon) -> Self {
        let process = Path::new("/proc").join(daemon.pid().as_raw_nonzero().to_string());
        let status = std::fs::read_to_string(process.join("status")).unwrap();
        let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        let kib: u64 = anonymous.trim().strip_suffix(" kB").unwrap().parse().unwrap();
        let mut files = world.leftovers();
        files.retain(|found| !found.starts_with("process "));
        for folder in ["code", "snapshots"] {
            let folder = std::fs::read_dir(world.file("daemon").join(folder)).unwrap();
            files.extend(folder.map(|entry| entry.unwrap().path().display().to_string()));
        }
        files.sort();
        Self {
            processes: world.processes().len(),
            descriptors: std::fs::read_dir(process.join("fd")).unwrap().count(),
            memory: kib << 10,
            files,
        }
    }

    /// Fails unless these are those of `before`.
    #[track_caller]
    pub fn assert_same_as(&self, before: &Self) {
        let counts = |of: &Self| (of.processes, of.descriptors);
        assert_eq!(counts(self), counts(before));
        assert_eq!(self.files, before.files);
        assert!(self.memory < before.memory + SLACK, "{} {}", before.memory, self.memory);
    }
}
