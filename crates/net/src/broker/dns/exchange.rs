//! A query to the host's resolvers, and their answer.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::rand::{GetRandomFlags, getrandom};

use super::message::{Answer, Question, Unusable, parse_answer, set_id};
use super::{PATIENCE, QUERY_LIMIT};
use crate::broker::open_socket;
use crate::broker::wire::SocketKind;

/// Bytes of the longest message, and of its length before it over TCP.
const MAX_MESSAGE: usize = 65_535;
const LENGTH: usize = 2;
/// Sockets of an exchange, one after the other.
const MAX_ATTEMPTS: usize = 6;
/// Datagrams that are read at once, so that a flood of them does not keep the broker.
const MAX_DATAGRAMS: usize = 16;

/// How a query is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Udp,
    Tcp,
}

/// A query that has no answer yet.
#[derive(Debug)]
pub(super) struct Exchange {
    question: Question,
    message: Vec<u8>,
    id: u16,
    transport: Transport,
    /// `None` after all attempts.
    socket: Option<OwnedFd>,
    /// Over TCP: how much of the query is sent, and what has come of the answer.
    sent: usize,
    received: Vec<u8>,
    attempts: usize,
    /// Which resolver is asked.
    resolver: usize,
    /// One that was asked did not answer.
    is_silent: bool,
    /// When the next one is.
    next_attempt: Instant,
    end: Instant,
}

/// What has become of an exchange.
#[derive(Debug)]
pub(super) enum Outcome {
    Waiting,
    /// The message, and what it has.
    Answered(Vec<u8>, Answer),
    /// No resolver answers, or one with a message that is not valid.
    Failed,
}

impl Exchange {
    /// Sends a query, first to the resolver with the number `resolver`.
    pub(super) fn start(
        question: Question,
        message: Vec<u8>,
        transport: Transport,
        (resolvers, resolver): (&[SocketAddr], usize),
        now: Instant,
    ) -> Self {
        let mut exchange = Self {
            question,
            message,
            id: 0,
            transport,
            socket: None,
            sent: 0,
            received: Vec::new(),
            attempts: 0,
            resolver,
            is_silent: false,
            next_attempt: now,
            end: now + QUERY_LIMIT,
        };
        exchange.attempt(resolvers, now);
        exchange
    }

    pub(super) fn question(&self) -> &Question {
        &self.question
    }

    pub(super) fn message(&self) -> &[u8] {
        &self.message
    }

    pub(super) fn transport(&self) -> Transport {
        self.transport
    }

    /// The resolver to ask instead of those that did not answer; `None` if there was none.
    pub(super) fn after_silent(&self) -> Option<usize> {
        self.is_silent.then_some(self.resolver)
    }

    /// When [`Exchange::progress`] has something to do without an event.
    pub(super) fn deadline(&self) -> Instant {
        if self.socket.is_some() { self.next_attempt.min(self.end) } else { self.next_attempt }
    }

    /// What to wait for.
    pub(super) fn interest(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let is_sent = self.transport == Transport::Udp || self.sent == LENGTH + self.message.len();
        let flags = if is_sent { PollFlags::IN } else { PollFlags::OUT };
        self.socket.as_ref().map(|socket| (socket.as_fd(), flags))
    }

    /// Does what the events of the socket, or the time, require.
    pub(super) fn progress(
        &mut self,
        has_events: bool,
        resolvers: &[SocketAddr],
        now: Instant,
    ) -> Outcome {
        if has_events {
            let result = match self.transport {
                Transport::Udp => self.receive_datagrams(),
                Transport::Tcp => self.use_stream(),
            };
            match result {
                // Another one may have more to say.
                Ok(Some(Ok((_, answer))))
                    if !answer.is_conclusive && self.attempts < resolvers.len() =>
                {
                    self.attempt_next(resolvers, now);
                }
                Ok(Some(Ok((message, answer)))) => return Outcome::Answered(message, answer),
                Ok(Some(Err(Unusable::Malformed | Unusable::Foreign))) => return Outcome::Failed,
                Ok(None) => {}
                Err(_) => {
                    self.is_silent = true;
                    self.attempt_next(resolvers, now);
                }
            }
        }
        if self.next_attempt <= now && self.socket.is_some() {
            self.is_silent = true;
            self.attempt_next(resolvers, now);
        }
        if self.socket.is_none() || self.end <= now { Outcome::Failed } else { Outcome::Waiting }
    }

    fn attempt_next(&mut self, resolvers: &[SocketAddr], now: Instant) {
        self.resolver += 1;
        self.attempt(resolvers, now);
    }

    /// Sends the query from a new socket, which has a port that the kernel draws, with a new id.
    fn attempt(&mut self, resolvers: &[SocketAddr], now: Instant) {
        self.socket = None;
        while self.attempts < MAX_ATTEMPTS && !resolvers.is_empty() {
            self.attempts += 1;
            self.next_attempt = now + PATIENCE;
            match self.open(resolvers[self.resolver % resolvers.len()]) {
                Ok(socket) => {
                    self.socket = Some(socket);
                    return;
                }
                Err(_) => self.resolver += 1,
            }
        }
        self.next_attempt = now;
    }

    fn open(&mut self, to: SocketAddr) -> Result<OwnedFd, Errno> {
        let mut id = [0; 2];
        getrandom(&mut id, GetRandomFlags::empty())?;
        self.id = u16::from_ne_bytes(id);
        set_id(&mut self.message, self.id);
        (self.sent, self.received) = (0, Vec::new());
        match self.transport {
            Transport::Udp => {
                let socket = open_socket(SocketKind::ResolverUdp, to)?;
                retry_on_intr(|| send(&socket, &self.message, SendFlags::DONTWAIT))?;
                Ok(socket)
            }
            Transport::Tcp => open_socket(SocketKind::ResolverTcp, to),
        }
    }

    /// A datagram that is not the answer is passed over: anyone can send one.
    fn receive_datagrams(&mut self) -> Result<Option<Parsed>, Errno> {
        let Some(socket) = &self.socket else { return Ok(None) };
        let mut message = vec![0; MAX_MESSAGE];
        for _ in 0..MAX_DATAGRAMS {
            let flags = RecvFlags::DONTWAIT;
            let len = match retry_on_intr(|| recv(socket, message.as_mut_slice(), flags)) {
                Ok((_, len)) => len,
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(errno),
            };
            match parse_answer(&message[..len], self.id, &self.question) {
                Err(Unusable::Foreign) => {}
                Err(malformed) => return Ok(Some(Err(malformed))),
                Ok(answer) => {
                    message.truncate(len);
                    return Ok(Some(Ok((message, answer))));
                }
            }
        }
        Ok(None)
    }

    fn use_stream(&mut self) -> Result<Option<Parsed>, Errno> {
        let Some(socket) = &self.socket else { return Ok(None) };
        let mut query =
            u16::try_from(self.message.len()).unwrap_or(u16::MAX).to_be_bytes().to_vec();
        query.extend(&self.message);
        while self.sent < query.len() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match retry_on_intr(|| send(socket, &query[self.sent..], flags)) {
                Ok(sent) => self.sent += sent,
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
        let mut part = vec![0; LENGTH + MAX_MESSAGE];
        loop {
            let due = match self.received.first_chunk() {
                Some(length) => LENGTH + usize::from(u16::from_be_bytes(*length)),
                None => LENGTH,
            };
            if due > LENGTH && self.received.len() == due {
                let message = self.received.split_off(LENGTH);
                let parsed = parse_answer(&message, self.id, &self.question);
                return Ok(Some(parsed.map(|answer| (message, answer))));
            }
            let room = &mut part[..due - self.received.len()];
            match retry_on_intr(|| recv(socket, &mut *room, RecvFlags::DONTWAIT)) {
                // An empty message is no answer, and its end none either.
                Ok((_, 0)) => return Err(Errno::CONNRESET),
                Ok((_, len)) => self.received.extend(&part[..len]),
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
    }
}

/// A message that may be the answer.
type Parsed = Result<(Vec<u8>, Answer), Unusable>;
