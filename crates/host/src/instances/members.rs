//! The microVMs one by one: whose they are, what they do, what they take.

use std::collections::HashMap;
use std::sync::Arc;

use uuid::Uuid;

use super::fleet::Fleet;
use super::ledger::Usage;
use crate::functions::Version;
use crate::metrics::StartKind;

/// All that are booked, by number.
#[derive(Debug, Default)]
pub(super) struct Members {
    next: u64,
    members: HashMap<u64, Member>,
}

/// One of them.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) function: String,
    pub(super) version: String,
    pub(super) revision: Uuid,
    pub(super) doing: Doing,
    /// Its process, from its start until it is asked to end.
    process: Option<u32>,
    /// How it started.
    pub(super) start: Option<StartKind>,
    /// Whether it has answered a request: it has then touched what a request touches.
    answered: bool,
    pub(super) usage: Usage,
}

/// What a microVM does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doing {
    Starting,
    Publishing,
    Busy,
    Idle,
    Ending,
}

impl Member {
    pub(super) fn of(version: &Version) -> Self {
        Self {
            function: version.function.clone(),
            version: version.version.clone(),
            revision: version.revision,
            doing: Doing::Starting,
            process: None,
            start: None,
            answered: false,
            usage: Usage::default(),
        }
    }
}

impl Members {
    pub(super) fn add(&mut self, member: Member) -> u64 {
        let number = self.next;
        self.next += 1;
        self.members.insert(number, member);
        number
    }

    pub(super) fn remove(&mut self, number: u64) {
        self.members.remove(&number);
    }

    /// It has started, and serves its first request.
    pub(super) fn began(&mut self, number: u64, process: Option<u32>, start: StartKind) {
        self.change(number, |member| {
            (member.process, member.start, member.doing) = (process, Some(start), Doing::Busy);
        });
    }

    /// It is started to be frozen.
    pub(super) fn publishes(&mut self, number: u64) {
        self.change(number, |member| member.doing = Doing::Publishing);
    }

    pub(super) fn busy(&mut self, number: u64) {
        self.change(number, |member| member.doing = Doing::Busy);
    }

    /// It has answered.
    pub(super) fn idle(&mut self, number: u64) {
        self.change(number, |member| (member.doing, member.answered) = (Doing::Idle, true));
    }

    /// Its process ends: the number of the process is soon another's.
    pub(super) fn ending(&mut self, number: u64) {
        self.change(number, |member| (member.doing, member.process) = (Doing::Ending, None));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    fn change(&mut self, number: u64, change: impl FnOnce(&mut Member)) {
        self.members.get_mut(&number).map(change);
    }

    fn processes(&self) -> Vec<(u64, u32)> {
        let process = |(number, member): (&u64, &Member)| Some((*number, member.process?));
        self.members.iter().filter_map(process).collect()
    }
}

impl Fleet {
    /// What is done every second: looks at what microVMs take, ends those that were idle for long, and has monitors stand by.
    pub(super) fn watch(self: &Arc<Self>) {
        // A thousand files of /proc, at worst: nobody waits for the lock meanwhile.
        let processes = self.lock().members.processes();
        let seen: Vec<(u64, Option<Usage>)> =
            processes.into_iter().map(|(number, process)| (number, usage(process))).collect();
        let mut state = self.lock();
        for (number, usage) in seen {
            let Some(usage) = usage else { continue };
            let mut answered = None;
            state.members.change(number, |member| {
                member.usage = usage;
                answered =
                    Some(member.revision).filter(|_| member.answered && member.process.is_some());
            });
            if let Some(revision) = answered {
                state.ledger.learn(revision, usage);
            }
        }
        self.end_idle(&mut state);
        if state.ledger.is_over() {
            self.make_room(&mut state);
        }
        state.tallies.sweep();
        self.count(&state);
        let closed = state.closed;
        drop(state);
        // A version may be booked for less than before.
        self.dispatch();
        if !closed {
            self.launcher.stand_by();
        }
    }
}

/// What a process has in DRAM, by the kernel's counters (proc_pid_status(5)): its anonymous memory, in which what it wrote to
/// private mappings is counted, and its page tables, are its own; pages of files and of shared memory are not.
pub(super) fn usage(process: u32) -> Option<Usage> {
    parse(&std::fs::read_to_string(format!("/proc/{process}/status")).ok()?)
}

fn parse(status: &str) -> Option<Usage> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line?.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    Some(Usage {
        private: field("RssAnon")? + field("VmPTE")?,
        shared: field("RssFile")? + field("RssShmem")?,
    })
}

#[cfg(test)]
#[path = "members_tests.rs"]
mod tests;
