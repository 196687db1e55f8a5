//! The monitor's side of the broker: requests that wait for it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::broker::wire::{Message, Request};
use crate::proxy::MAX_FLOWS;
use crate::table::Table;

/// Requests that the broker has and has not answered.
const MAX_IN_FLIGHT: usize = 32;
/// Requests that wait to be sent, with those of flows that have ended: twice the flows, so that at
/// least half of them have ended when these are removed.
const MAX_WAITING: usize = 2 * MAX_FLOWS;

/// Requests for sockets.
#[derive(Debug)]
pub(crate) struct Requests {
    /// `None` without a broker, and after it has ended.
    broker: Option<OwnedFd>,
    waiting: VecDeque<Request>,
    in_flight: usize,
}

impl Requests {
    /// Requests to a broker; without one they have no room.
    pub(crate) const fn new(broker: Option<OwnedFd>) -> Self {
        Self { broker, waiting: VecDeque::new(), in_flight: 0 }
    }

    /// Whether another request may wait.
    pub(crate) fn has_room(&mut self, table: &Table) -> bool {
        if self.waiting.len() >= MAX_WAITING {
            self.waiting.retain(|request| table.has(request.id));
        }
        self.broker.is_some() && self.waiting.len() < MAX_WAITING
    }

    /// A request to a broker that has ended has no answer.
    pub(crate) fn ask(&mut self, request: Request, table: &Table) {
        if self.broker.is_some() {
            self.waiting.push_back(request);
            self.send(table);
        }
    }

    /// Sends what the broker has room for. An answer makes room, and so does its socket. A request
    /// is not sent if its flow has ended: the others do not wait for it.
    pub(crate) fn send(&mut self, table: &Table) {
        let Some(broker) = &self.broker else { return };
        while self.in_flight < MAX_IN_FLIGHT
            && let Some(request) = self.waiting.front()
        {
            if table.has(request.id) {
                // If the broker has ended, its descriptor has an event. It is kept until then:
                // what waits is refused with it.
                if request.send(broker).is_err() {
                    return;
                }
                self.in_flight += 1;
            }
            self.waiting.pop_front();
        }
    }

    /// The next message. `None` also after the broker has ended; see [`Requests::is_lost`].
    pub(crate) fn next_message(&mut self) -> Option<Message> {
        loop {
            match Message::receive(self.broker.as_ref()?) {
                Ok(message) => {
                    if matches!(message, Message::Answer(_)) {
                        self.in_flight = self.in_flight.saturating_sub(1);
                    }
                    return Some(message);
                }
                Err(Errno::AGAIN) => return None,
                // A connection was closed.
                Err(Errno::MFILE) => {}
                Err(_) => {
                    self.broker = None;
                    self.waiting.clear();
                    return None;
                }
            }
        }
    }

    /// Whether the broker has ended, and answers no request.
    pub(crate) const fn is_lost(&self) -> bool {
        self.broker.is_none()
    }
}
