//! What the transports of devices count.

/// The most queues of a device: the balloon's.
const MOST_QUEUES: usize = 4;

/// What the transport of a device has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransportCounters {
    /// Its queues.
    pub queues: [QueueCounters; MOST_QUEUES],
    /// Events of the device's own, such as those of a socket or a timer.
    pub events: u64,
    /// Events of the device's own after which it stopped.
    pub event_failures: u64,
    /// Starts that failed: the driver's set-up was not valid, or the host could not watch the
    /// device.
    pub setup_failures: u64,
    /// Accesses of the guest past the end of the configuration space.
    pub config_failures: u64,
}

/// What was done for a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounters {
    /// Notifications of the guest.
    pub notifications: u64,
    /// Those of them that came without a request.
    pub empty_notifications: u64,
    /// Turns after which the device stopped.
    pub failures: u64,
}
