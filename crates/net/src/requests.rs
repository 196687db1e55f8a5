//! The monitor's side of the broker: requests that wait for it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::broker::wire::{Message, Request};

/// Requests that the broker has and has not answered.
const MAX_IN_FLIGHT: usize = 32;
/// Requests that wait to be sent.
const MAX_WAITING: usize = 16_384;

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
    pub(crate) fn has_room(&self) -> bool {
        self.broker.is_some() && self.waiting.len() < MAX_WAITING
    }

    /// A request to a broker that has ended has no answer.
    pub(crate) fn ask(&mut self, request: Request) {
        if self.broker.is_some() {
            self.waiting.push_back(request);
            self.send();
        }
    }

    /// Sends what the broker has room for. An answer makes room, and so does its socket.
    pub(crate) fn send(&mut self) {
        let Some(broker) = &self.broker else { return };
        while self.in_flight < MAX_IN_FLIGHT
            && let Some(request) = self.waiting.front()
        {
            match request.send(broker) {
                Ok(()) => {
                    self.waiting.pop_front();
                    self.in_flight += 1;
                }
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    self.broker = None;
                    return;
                }
            }
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
