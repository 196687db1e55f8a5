//! The input of the serial console, from a descriptor of the host.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;

use crate::bus::Bus;

/// Identify the events.
const INPUT: u32 = 0;
const ROOM: u32 = 1;

/// Passes what it reads to the guest's serial port, as much as the port has room for.
pub(super) struct ConsoleInput {
    input: OwnedFd,
    /// Signalled when the guest has read everything.
    room: EventFd,
    bus: Arc<Bus>,
    ended: bool,
}

impl ConsoleInput {
    /// `room` is the event of the serial port on `bus`.
    pub(super) fn new(input: OwnedFd, room: EventFd, bus: Arc<Bus>) -> Self {
        Self { input, room, bus, ended: false }
    }

    fn events(&self) -> Events {
        Events::with_data_raw(self.input.as_raw_fd(), INPUT, EventSet::IN)
    }

    fn read(&mut self, ops: &mut EventOps<'_>) {
        let mut serial = self.bus.serial();
        let mut bytes = vec![0; serial.fifo_capacity()];
        if bytes.is_empty() {
            // Until the guest has read them. An input that stayed would report its end all the
            // time.
            let _ = ops.remove(self.events());
            return;
        }
        match rustix::io::read(&self.input, &mut bytes[..]) {
            // The interrupt may fail; the guest also polls. In loop mode the port drops input.
            Ok(len) if len > 0 => drop(serial.enqueue_raw_bytes(&bytes[..len])),
            Err(Errno::AGAIN | Errno::INTR) => {}
            _ => {
                self.ended = true;
                let _ = ops.remove(self.events());
            }
        }
    }
}

impl MutEventSubscriber for ConsoleInput {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if events.data() != ROOM {
            self.read(ops);
            return;
        }
        let _ = self.room.read();
        if !self.ended {
            // Fails if it is there.
            let _ = ops.add(self.events());
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        // A regular file or /dev/null has no events, and is no input.
        self.ended = ops.add(self.events()).is_err();
        if !self.ended {
            let _ = ops.add(Events::with_data(&self.room, ROOM, EventSet::IN));
        }
    }
}

#[cfg(test)]
#[path = "console_input_tests.rs"]
mod tests;
