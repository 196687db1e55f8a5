//! What a microVM has done since its monitor started.

use std::ops::AddAssign;
use std::time::Duration;

use crate::console::SerialCounters;
use crate::i8042::KeyboardCounters;
use crate::vcpu::ExitCounters;
use crate::virtio::{
    BalloonCounters, DiskCounters, EntropyCounters, NetworkCounters, TransportCounters,
    VsockCounters,
};

/// The counters of a microVM's devices and vCPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The drives, in the order of their windows.
    pub drives: Vec<DeviceCounters<DiskCounters>>,
    /// The network devices, in the order of their windows.
    pub networks: Vec<DeviceCounters<NetworkCounters>>,
    /// The vsock, if the guest has one.
    pub vsock: Option<DeviceCounters<VsockCounters>>,
    /// The entropy device, if the guest has one.
    pub entropy: Option<DeviceCounters<EntropyCounters>>,
    /// The balloon, if the guest has one.
    pub balloon: Option<DeviceCounters<BalloonCounters>>,
    /// The serial port.
    pub serial: SerialCounters,
    /// The keyboard controller, if the guest has one.
    pub keyboard: Option<KeyboardCounters>,
    /// All vCPUs together.
    pub exits: ExitCounters,
    /// Events that the event loop has handled.
    pub events: u64,
}

/// The counters of a virtio device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounters<C> {
    /// Its id.
    pub id: String,
    /// Those that all devices have.
    pub transport: TransportCounters,
    /// Its own.
    pub device: C,
}

/// How often something was done, and how long it took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timed {
    /// How often.
    pub count: u64,
    /// The shortest time; zero if it was never done.
    pub shortest: Duration,
    /// The longest time.
    pub longest: Duration,
    /// All times together.
    pub sum: Duration,
}

impl Timed {
    pub(crate) fn once(time: Duration) -> Self {
        Self { count: 1, shortest: time, longest: time, sum: time }
    }
}

impl AddAssign for Timed {
    fn add_assign(&mut self, other: Self) {
        let (own, others) = (self.count > 0, other.count > 0);
        self.shortest = match (own, others) {
            (true, true) => self.shortest.min(other.shortest),
            (true, false) => self.shortest,
            (false, _) => other.shortest,
        };
        self.longest = self.longest.max(other.longest);
        self.sum += other.sum;
        self.count += other.count;
    }
}

#[cfg(test)]
#[path = "counters_tests.rs"]
mod tests;
