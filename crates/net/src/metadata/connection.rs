//! A guest's connection to its metadata service, as the other end of a TCP flow.

use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;

use super::Service;
use super::request::{MAX_REQUEST, Parsed, parse};
use super::response::{Response, Status};

/// One connection. It has the next request answered when the guest has got the answer before.
#[derive(Debug)]
pub(crate) struct Connection {
    service: Arc<Service>,
    /// Bytes of requests that are not answered.
    requests: Vec<u8>,
    answer: Vec<u8>,
    /// How much of it was read.
    read: usize,
    /// The answer is the last one.
    is_last: bool,
    /// The guest sends nothing more.
    is_shut: bool,
    last_used: Instant,
}

impl Connection {
    pub(crate) fn new(service: Arc<Service>) -> Self {
        Self {
            service,
            requests: Vec::new(),
            answer: Vec::new(),
            read: 0,
            is_last: false,
            is_shut: false,
            last_used: Instant::now(),
        }
    }

    /// When the guest last sent something.
    pub(crate) const fn last_used(&self) -> Instant {
        self.last_used
    }

    /// Takes all bytes.
    ///
    /// # Errors
    /// More requests wait than a guest may send before it takes an answer.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<usize, Errno> {
        self.last_used = Instant::now();
        if !self.is_last {
            self.requests.extend_from_slice(bytes);
            self.answer_next();
            if self.requests.len() > MAX_REQUEST {
                return Err(Errno::NOBUFS);
            }
        }
        Ok(bytes.len())
    }

    pub(crate) const fn shut(&mut self) {
        self.is_shut = true;
    }

    /// Whether [`Connection::read`] has something.
    pub(crate) const fn is_ready(&self) -> bool {
        self.read < self.answer.len() || self.is_last || self.is_shut
    }

    /// The next bytes for the guest, at most `room`; none at the end.
    ///
    /// # Errors
    /// `AGAIN`: there are none so far.
    pub(crate) fn read(&mut self, room: usize) -> Result<&[u8], Errno> {
        if self.read == self.answer.len() {
            // An idle connection holds no memory.
            self.answer = Vec::new();
            self.read = 0;
            self.answer_next();
            if self.answer.is_empty() && !self.is_last && !self.is_shut {
                return Err(Errno::AGAIN);
            }
        }
        let from = self.read;
        self.read = self.answer.len().min(from + room);
        Ok(&self.answer[from..self.read])
    }

    /// Answers the next request, if it is complete and there is no answer.
    fn answer_next(&mut self) {
        if !self.answer.is_empty() || self.is_last || self.requests.is_empty() {
            return;
        }
        let (response, is_head) = match parse(&self.requests) {
            Parsed::Partial => return,
            Parsed::Request(request, len) => {
                self.requests.drain(..len);
                self.is_last = request.closes;
                (self.service.answer(&request, self.last_used), request.method == "HEAD")
            }
            Parsed::Invalid(reason) => {
                self.is_last = true;
                (Response::text(Status::BadRequest, reason), false)
            }
        };
        if self.is_last || self.requests.is_empty() {
            self.requests = Vec::new();
        }
        self.answer = response.to_bytes(is_head, self.is_last);
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
