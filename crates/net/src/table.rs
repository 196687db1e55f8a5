//! The flows of a proxy: found by their addresses and by their ids, in line for the guest, and at
//! their deadlines.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::datagram::DatagramFlow;
use crate::flow::FlowKey;
use crate::tcp::{Shared, TcpFlow};

/// The first id of a flow. Smaller numbers are the other sources of events.
const FIRST_ID: u64 = 16;
/// Bytes of the frames that a flow makes before the next one has its turn.
const TURN: usize = 1 << 20;

/// Hashes ids: they count up, and no guest chooses them.
#[derive(Debug, Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        // Fibonacci hashing: the map uses the high bits, too.
        self.0 = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// A flow of either kind.
#[derive(Debug)]
pub(crate) enum Flow {
    Tcp(Box<TcpFlow>),
    Datagram(Box<DatagramFlow>),
}

impl Flow {
    fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Tcp(flow) => flow.deadline(),
            Self::Datagram(flow) => Some(flow.deadline()),
        }
    }

    fn is_published(&self) -> bool {
        matches!(self, Self::Tcp(flow) if flow.is_published())
    }

    fn is_over(&self) -> bool {
        match self {
            Self::Tcp(flow) => flow.is_over(),
            Self::Datagram(flow) => flow.is_over(),
        }
    }
}

#[derive(Debug)]
struct Entry {
    key: FlowKey,
    flow: Flow,
    /// It is in line.
    ready: bool,
    /// Its entry among the timers, at its deadline or before.
    timer: Option<Instant>,
}

/// All flows. Ids are used once, so an event or an answer for an old flow finds none.
#[derive(Debug)]
pub(crate) struct Table {
    entries: HashMap<u64, Entry, BuildHasherDefault<IdHasher>>,
    ids: HashMap<FlowKey, u64>,
    /// The last one that was found: frames of a flow come together.
    last: Option<(FlowKey, u64)>,
    datagram_flows: usize,
    /// Flows to published ports.
    published_flows: usize,
    next_id: u64,
    ready: VecDeque<u64>,
    /// The flow that made the last frames, and their bytes.
    turn: (u64, usize),
    timers: BTreeSet<(Instant, u64)>,
    timer: OwnedFd,
    /// When the timer expires.
    armed: Option<Instant>,
}

impl Table {
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Self {
            entries: HashMap::default(),
            ids: HashMap::new(),
            last: None,
            datagram_flows: 0,
            published_flows: 0,
            next_id: FIRST_ID,
            ready: VecDeque::new(),
            turn: (0, 0),
            timers: BTreeSet::new(),
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            armed: None,
        })
    }

    pub(crate) const fn timer(&self) -> &OwnedFd {
        &self.timer
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn published_flows(&self) -> usize {
        self.published_flows
    }

    pub(crate) fn has(&self, id: u64) -> bool {
        self.entries.contains_key(&id)
    }

    pub(crate) fn find(&mut self, key: &FlowKey) -> Option<u64> {
        if let Some((last, id)) = &self.last
            && last == key
        {
            return Some(*id);
        }
        let id = self.ids.get(key).copied()?;
        self.last = Some((*key, id));
        Some(id)
    }

    pub(crate) fn get_mut(&mut self, id: u64) -> Option<(FlowKey, &mut Flow)> {
        self.entries.get_mut(&id).map(|entry| (entry.key, &mut entry.flow))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&FlowKey, &Flow)> {
        self.entries.values().map(|entry| (&entry.key, &entry.flow))
    }

    pub(crate) fn insert(&mut self, key: FlowKey, flow: Flow, now: Instant) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.ids.insert(key, id);
        self.datagram_flows += usize::from(matches!(flow, Flow::Datagram(_)));
        self.published_flows += usize::from(flow.is_published());
        self.entries.insert(id, Entry { key, flow, ready: false, timer: None });
        self.update_timer(id, now);
        id
    }

    pub(crate) fn remove(&mut self, id: u64, shared: &mut Shared) {
        let Some(mut entry) = self.entries.remove(&id) else { return };
        self.ids.remove(&entry.key);
        self.last = None;
        if let Some(at) = entry.timer {
            self.timers.remove(&(at, id));
        }
        self.published_flows -= usize::from(entry.flow.is_published());
        match &mut entry.flow {
            Flow::Tcp(flow) => flow.close(shared),
            Flow::Datagram(flow) => {
                flow.close(shared);
                self.datagram_flows -= 1;
            }
        }
        if self.entries.is_empty() {
            shared.pool.trim();
            shared.stage.trim();
        }
    }

    /// Ends the flow of datagrams that is the next to end anyway, if there are `most` of them.
    pub(crate) fn limit_datagram_flows(&mut self, most: usize, now: Instant, shared: &mut Shared) {
        while self.datagram_flows >= most {
            let is_datagram = |(_, id): &&(Instant, u64)| {
                self.entries.get(id).is_some_and(|entry| matches!(entry.flow, Flow::Datagram(_)))
            };
            let Some((at, id)) = self.timers.iter().find(is_datagram).copied() else { return };
            let Some(entry) = self.entries.get_mut(&id) else { return };
            if entry.flow.deadline().is_some_and(|deadline| deadline <= at) {
                self.remove(id, shared);
            } else {
                // It was used since.
                entry.timer = None;
                self.timers.remove(&(at, id));
                self.update_timer(id, now);
            }
        }
    }

    pub(crate) fn remove_all(&mut self, shared: &mut Shared) {
        let ids: Vec<u64> = self.entries.keys().copied().collect();
        for id in ids {
            if let Some((_, Flow::Tcp(flow))) = self.get_mut(id) {
                flow.reset_host();
            }
            self.remove(id, shared);
        }
        self.ready.clear();
    }

    /// After a change of a flow: it ends, or is in line for the guest, and its deadline is watched.
    pub(crate) fn changed(&mut self, id: u64, now: Instant, shared: &mut Shared) {
        self.line_up(id, VecDeque::push_back, now, shared);
    }

    fn line_up(
        &mut self,
        id: u64,
        push: fn(&mut VecDeque<u64>, u64),
        now: Instant,
        shared: &mut Shared,
    ) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        if entry.flow.is_over() {
            self.remove(id, shared);
            return;
        }
        if !entry.ready {
            entry.ready = true;
            push(&mut self.ready, id);
        }
        self.update_timer(id, now);
    }

    /// After a flow has made a frame of `len` bytes. It keeps its turn for some more: the guest
    /// handles the segments of one connection together if they arrive in a row.
    pub(crate) fn made(&mut self, id: u64, len: usize, now: Instant, shared: &mut Shared) {
        let (of, before) = self.turn;
        let made = if of == id { before + len } else { len };
        if made < TURN {
            self.turn = (id, made);
            self.line_up(id, VecDeque::push_front, now, shared);
        } else {
            self.turn = (id, 0);
            self.changed(id, now, shared);
        }
    }

    /// After a flow had nothing for the guest: it waits for the next change.
    pub(crate) fn idle(&mut self, id: u64, now: Instant, shared: &mut Shared) {
        let over = self.entries.get(&id).is_some_and(|entry| entry.flow.is_over());
        if over {
            self.remove(id, shared);
        } else {
            self.update_timer(id, now);
        }
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The flow that is next in line.
    pub(crate) fn next_ready(&mut self) -> Option<u64> {
        loop {
            let id = self.ready.pop_front()?;
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.ready = false;
                return Some(id);
            }
        }
    }

    /// The next flow whose deadline has passed.
    pub(crate) fn next_expired(&mut self, now: Instant) -> Option<u64> {
        loop {
            let (at, id) = *self.timers.first()?;
            if at > now {
                return None;
            }
            self.timers.remove(&(at, id));
            let entry = self.entries.get_mut(&id)?;
            entry.timer = None;
            if entry.flow.deadline().is_some_and(|deadline| deadline <= now) {
                return Some(id);
            }
            self.update_timer(id, now);
        }
    }

    /// The timer has expired.
    pub(crate) fn rearm(&mut self, now: Instant) {
        self.armed = None;
        if let Some((at, _)) = self.timers.first() {
            self.arm(*at, now);
        }
    }

    /// Deadlines that move back leave their timer as it is: it finds the new one.
    fn update_timer(&mut self, id: u64, now: Instant) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let Some(deadline) = entry.flow.deadline() else { return };
        if entry.timer.is_some_and(|at| at <= deadline) {
            return;
        }
        if let Some(at) = entry.timer.replace(deadline) {
            self.timers.remove(&(at, id));
        }
        self.timers.insert((deadline, id));
        self.arm(deadline, now);
    }

    fn arm(&mut self, at: Instant, now: Instant) {
        if self.armed.is_some_and(|armed| armed <= at) {
            return;
        }
        // A value of zero would disarm it.
        let left = at.saturating_duration_since(now).as_nanos().max(1);
        let (seconds, nanoseconds) = (left / 1_000_000_000, left % 1_000_000_000);
        let value = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: i64::try_from(seconds).unwrap_or(i64::MAX),
                tv_nsec: i64::try_from(nanoseconds).unwrap_or_default(),
            },
        };
        // It fails for an invalid value alone, and this one is valid.
        if timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value).is_ok() {
            self.armed = Some(at);
        }
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
