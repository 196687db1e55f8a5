//! Forwards queries to the host's resolvers, and resolves names of rules.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use smoltcp::wire::{DnsQueryType, DnsRcode};

use super::end::{End, IDLE, Received};
use super::exchange::{Exchange, Outcome, Transport};
use super::message::{Answer, Question, Refused, error_answer, id, parse_query, query, set_id};
use super::pins::Pins;

/// Queries of the guest over UDP without an answer; a further one is dropped.
const MAX_QUERIES: usize = 32;
/// Queries of the broker itself without an answer; a further one waits.
const MAX_OWN_QUERIES: usize = 16;
/// Ends of the monitor for datagrams, and for streams. For a further one the end that was used
/// longest ago is closed.
const MAX_DATAGRAM_ENDS: usize = 64;
const MAX_STREAM_ENDS: usize = 8;
/// Datagrams that are taken from an end at once.
const MAX_DATAGRAMS: usize = 16;
/// What a name is resolved to.
const KINDS: [DnsQueryType; 2] = [DnsQueryType::A, DnsQueryType::Aaaa];

/// The DNS of one guest.
#[derive(Debug)]
pub(in crate::broker) struct Forwarder {
    resolvers: Vec<SocketAddr>,
    /// The resolver that is asked first: those before it did not answer.
    preferred: usize,
    ends: Vec<End>,
    /// The number of the next end.
    next_end: u64,
    exchanges: Vec<(Asker, Exchange)>,
    /// Questions of the broker itself that are not sent.
    waiting: VecDeque<(usize, DnsQueryType)>,
    /// The names that are being resolved.
    resolving: HashMap<usize, Resolving>,
}

/// Where an answer goes.
#[derive(Clone, Copy, Debug)]
enum Asker {
    /// To the monitor: the number of its end, and the id of its query.
    End(u64, u16),
    /// Nowhere: a name of a rule is resolved.
    Own(usize),
}

#[derive(Debug)]
struct Resolving {
    unanswered: usize,
    /// The shortest life of a record so far.
    ttl: Option<Duration>,
}

impl Forwarder {
    pub(in crate::broker) fn new(resolvers: Vec<SocketAddr>) -> Self {
        Self {
            resolvers,
            preferred: 0,
            ends: Vec::new(),
            next_end: 0,
            exchanges: Vec::new(),
            waiting: VecDeque::new(),
            resolving: HashMap::new(),
        }
    }

    /// A socket for the monitor, in place of one to a resolver.
    pub(in crate::broker) fn connect(
        &mut self,
        is_stream: bool,
        now: Instant,
    ) -> Result<OwnedFd, Errno> {
        if self.resolvers.is_empty() {
            return Err(Errno::NETUNREACH);
        }
        let (transport, most) = if is_stream {
            (Transport::Tcp, MAX_STREAM_ENDS)
        } else {
            (Transport::Udp, MAX_DATAGRAM_ENDS)
        };
        let (end, monitor) = End::pair(self.next_end, transport, now)?;
        self.next_end += 1;
        let alike = || self.ends.iter().filter(|end| end.transport() == transport);
        if alike().count() >= most {
            let oldest = alike().min_by_key(|end| end.last_used).map(|end| end.number);
            self.ends.retain(|end| Some(end.number) != oldest);
        }
        self.ends.push(end);
        Ok(monitor)
    }

    /// Begins to resolve the name with a number of [`Pins::unresolved`].
    pub(in crate::broker) fn resolve(&mut self, exact: usize) {
        self.resolving.entry(exact).or_insert_with(|| {
            self.waiting.extend(KINDS.map(|kind| (exact, kind)));
            Resolving { unanswered: KINDS.len(), ttl: None }
        });
    }

    /// What to wait for. [`Forwarder::progress`] gets the events in this order.
    pub(in crate::broker) fn interests(&self) -> impl Iterator<Item = PollFd<'_>> {
        let exchanges = self.exchanges.iter().map(|(_, exchange)| exchange.interest());
        let ends = self.ends.iter().map(|end| Some(end.interest()));
        exchanges.chain(ends).flatten().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags))
    }

    /// When there is something to do without an event.
    pub(in crate::broker) fn deadline(&self, now: Instant) -> Option<Instant> {
        if !self.waiting.is_empty() && self.own_queries() < MAX_OWN_QUERIES {
            return Some(now);
        }
        let exchanges = self.exchanges.iter().map(|(_, exchange)| exchange.deadline());
        exchanges.chain(self.ends.iter().map(|end| end.last_used + IDLE)).min()
    }

    /// Handles events and deadlines. `admit` is called before each query of the guest, and may
    /// wait. Returns whether a name was resolved.
    pub(in crate::broker) fn progress(
        &mut self,
        events: &[PollFlags],
        pins: &mut Pins,
        now: Instant,
        mut admit: impl FnMut(),
    ) -> bool {
        let mut events = events.iter().map(|events| !events.is_empty());
        let mut is_resolved = false;
        for (asker, mut exchange) in std::mem::take(&mut self.exchanges) {
            let has_events = exchange.interest().is_some() && events.next().unwrap_or_default();
            let outcome = exchange.progress(has_events, &self.resolvers, now);
            self.preferred = exchange.after_silent().unwrap_or(self.preferred).max(self.preferred);
            match outcome {
                Outcome::Waiting => self.exchanges.push((asker, exchange)),
                Outcome::Answered(message, answer) => {
                    is_resolved |= self.answered(asker, &exchange, message, &answer, pins, now);
                }
                Outcome::Failed => is_resolved |= self.failed(asker, &exchange, pins, now),
            }
        }
        for mut end in std::mem::take(&mut self.ends) {
            let has_events = events.next().unwrap_or_default();
            let is_open = !has_events || self.serve(&mut end, now, &mut admit);
            if is_open && now < end.last_used + IDLE {
                self.ends.push(end);
            }
        }
        is_resolved | self.start_own(pins, now)
    }

    /// Takes queries from an end. Returns whether it stays open.
    fn serve(&mut self, end: &mut End, now: Instant, admit: &mut impl FnMut()) -> bool {
        for _ in 0..MAX_DATAGRAMS {
            let message = match end.progress(now) {
                Received::Query(message) => message,
                Received::Nothing => break,
                Received::Closed => return false,
            };
            admit();
            let transport = end.transport();
            let is_guests = |asker: &Asker| matches!(asker, Asker::End(..));
            let datagrams = self.exchanges.iter().filter(|(asker, exchange)| {
                is_guests(asker) && exchange.transport() == Transport::Udp
            });
            match parse_query(&message) {
                // The guest sends it again. A stream has one query at a time.
                Ok(_) if transport == Transport::Udp && datagrams.count() >= MAX_QUERIES => {}
                Ok(question) => {
                    let asker = Asker::End(end.number, id(&message));
                    self.ask(asker, question, message, transport, now);
                }
                Err(Refused::Answered(answer)) => end.answer(&answer, now),
                Err(Refused::NoQuery) if transport == Transport::Tcp => return false,
                Err(Refused::NoQuery) => {}
            }
            if transport == Transport::Tcp {
                break;
            }
        }
        true
    }

    fn ask(
        &mut self,
        asker: Asker,
        question: Question,
        message: Vec<u8>,
        transport: Transport,
        now: Instant,
    ) {
        let resolvers = (self.resolvers.as_slice(), self.preferred);
        let exchange = Exchange::start(question, message, transport, resolvers, now);
        self.exchanges.push((asker, exchange));
    }

    /// Sends questions of the broker itself. Returns whether one has failed at once.
    fn start_own(&mut self, pins: &mut Pins, now: Instant) -> bool {
        let mut is_resolved = false;
        while self.own_queries() < MAX_OWN_QUERIES
            && let Some((exact, kind)) = self.waiting.pop_front()
        {
            let Some(name) = pins.name(exact) else { continue };
            if self.resolvers.is_empty() {
                is_resolved |= self.resolved(exact, None, pins, now);
                continue;
            }
            let question = Question { name: name.clone(), kind };
            let message = query(&question);
            self.ask(Asker::Own(exact), question, message, Transport::Udp, now);
        }
        is_resolved
    }

    fn own_queries(&self) -> usize {
        self.exchanges.iter().filter(|(asker, _)| matches!(asker, Asker::Own(_))).count()
    }

    /// The answer to a query: its addresses are pinned before it is passed on.
    fn answered(
        &mut self,
        asker: Asker,
        exchange: &Exchange,
        mut message: Vec<u8>,
        answer: &Answer,
        pins: &mut Pins,
        now: Instant,
    ) -> bool {
        let pinned = pins.pin(answer, now);
        match asker {
            Asker::End(number, id) => {
                if pinned.is_err() {
                    return self.failed(asker, exchange, pins, now);
                }
                set_id(&mut message, id);
                self.pass(number, &message, now);
                false
            }
            Asker::Own(exact) => {
                if answer.is_truncated && exchange.transport() == Transport::Udp {
                    let question = exchange.question().clone();
                    let message = query(&question);
                    self.ask(asker, question, message, Transport::Tcp, now);
                    return false;
                }
                let ttl = answer.addresses.iter().map(|address| address.ttl).min();
                self.resolved(exact, ttl, pins, now)
            }
        }
    }

    fn failed(&mut self, asker: Asker, exchange: &Exchange, pins: &mut Pins, now: Instant) -> bool {
        match asker {
            Asker::End(number, id) => {
                let mut message = error_answer(exchange.message(), DnsRcode::ServFail);
                set_id(&mut message, id);
                self.pass(number, &message, now);
                false
            }
            Asker::Own(exact) => self.resolved(exact, None, pins, now),
        }
    }

    /// Sends an answer to an end, if it is still there.
    fn pass(&mut self, number: u64, message: &[u8], now: Instant) {
        if let Some(end) = self.ends.iter_mut().find(|end| end.number == number) {
            end.answer(message, now);
        }
    }

    /// One kind of a name's addresses is known. Returns whether all are.
    fn resolved(
        &mut self,
        exact: usize,
        ttl: Option<Duration>,
        pins: &mut Pins,
        now: Instant,
    ) -> bool {
        let Some(resolving) = self.resolving.get_mut(&exact) else { return false };
        resolving.ttl = resolving.ttl.into_iter().chain(ttl).min();
        resolving.unanswered -= 1;
        if resolving.unanswered > 0 {
            return false;
        }
        pins.set_resolved(exact, resolving.ttl, now);
        self.resolving.remove(&exact);
        true
    }
}

#[cfg(test)]
#[path = "forwarder_tests.rs"]
mod tests;
