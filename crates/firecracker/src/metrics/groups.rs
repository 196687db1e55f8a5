//! The metrics by Firecracker's groups and names.

use std::collections::BTreeMap;
use std::time::Duration;

use firn_vmm::{
    BalloonCounters, Counters, DeviceCounters, DiskCounters, EntropyCounters, ExitCounters,
    KeyboardCounters, NetworkCounters, SerialCounters, Timed, VsockCounters,
};
use serde_json::{Map, Value, json};

use super::requests::Counter;

/// A group and a name in it.
pub(super) type Key = (String, String);

/// Metrics with a common name.
#[derive(Default)]
pub(super) struct Group {
    pub(super) name: String,
    /// Counts since the start.
    counts: Vec<(String, u64)>,
    /// Values that each line has as they are.
    values: Vec<(&'static str, u64)>,
    times: Vec<(&'static str, Timed)>,
}

impl Group {
    pub(super) fn new(name: &str, counts: &[(&str, u64)]) -> Self {
        let counts = counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        Self { name: name.to_owned(), counts, ..Self::default() }
    }

    /// A part of a group of requests.
    pub(super) fn of_requests(counter: Counter, count: u64, fails: u64) -> Self {
        let (group, name) = counter.place();
        let fails = counter.has_failures().then(|| (format!("{name}_fails"), fails));
        let counts = [(format!("{name}_count"), count)].into_iter().chain(fails).collect();
        Self { name: group.to_owned(), counts, ..Self::default() }
    }

    pub(super) fn with_values(self, values: impl IntoIterator<Item = (&'static str, u64)>) -> Self {
        Self { values: values.into_iter().collect(), ..self }
    }

    fn with_times(self, times: &[(&'static str, Timed)]) -> Self {
        Self { times: times.to_vec(), ..self }
    }

    /// Its members. Counts become what `since` makes of them and their names, and are noted in
    /// `totals`.
    pub(super) fn to_json(
        &self,
        totals: &mut BTreeMap<Key, u64>,
        since: impl Fn(u64, &Key) -> u64,
    ) -> Map<String, Value> {
        let mut count = |name: &str, total| {
            let key = (self.name.clone(), name.to_owned());
            let since = since(total, &key);
            totals.insert(key, total);
            since
        };
        let mut members = Map::new();
        for (name, total) in &self.counts {
            members.insert(name.clone(), count(name, *total).into());
        }
        for (name, value) in &self.values {
            members.insert((*name).to_owned(), (*value).into());
        }
        for (name, Timed { shortest, longest, sum, .. }) in &self.times {
            let sum = count(name, micros(*sum));
            let (shortest, longest) = (micros(*shortest), micros(*longest));
            let times = json!({ "min_us": shortest, "max_us": longest, "sum_us": sum });
            members.insert((*name).to_owned(), times);
        }
        members
    }

    /// The sum of groups with the same members.
    fn sum(name: &str, groups: &[Self], none: Self) -> Self {
        let mut sum = Self { name: name.to_owned(), ..none };
        for group in groups {
            sum.counts.iter_mut().zip(&group.counts).for_each(|((_, to), (_, from))| *to += from);
            sum.times.iter_mut().zip(&group.times).for_each(|((_, to), (_, from))| *to += *from);
        }
        sum
    }
}

/// µs.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Those of a microVM's devices and vCPUs. Without a device its metrics are zeros.
/// `updates` are those of drives' files, and those that failed.
pub(super) fn of_microvm(
    counters: &Counters,
    updates: &BTreeMap<String, (u64, u64)>,
) -> Vec<Group> {
    let Counters { drives, networks, vsock, entropy, balloon, serial, keyboard, exits, events } =
        counters;
    let disks = drives.iter().map(|drive| {
        let updates = updates.get(&drive.id).copied().unwrap_or_default();
        disk(&format!("block_{}", drive.id), drive, updates)
    });
    let disks: Vec<_> = disks.collect();
    let links = networks.iter().map(|link| network(&format!("net_{}", link.id), link));
    let links: Vec<_> = links.collect();
    let services = networks.iter().map(|link| mmds(&link.device.backend.metadata));
    let services: Vec<_> = services.collect();
    let mut groups = vec![
        Group::sum("block", &disks, disk("", &DeviceCounters::default(), (0, 0))),
        Group::sum("net", &links, network("", &DeviceCounters::default())),
        Group::sum("mmds", &services, mmds(&firn_net::Counters::default())),
        of_vsock(&vsock.clone().unwrap_or_default()),
        of_entropy(&entropy.clone().unwrap_or_default()),
        of_balloon(&balloon.clone().unwrap_or_default()),
        of_serial(*serial),
        of_keyboard(keyboard.unwrap_or_default()),
        of_exits(*exits),
        // A process that panics ends without a line.
        Group::new("vmm", &[("device_events", *events), ("panic_count", 0)]),
        // So does one that a system call or a signal ends.
        Group::new("seccomp", &[("num_faults", 0)]),
        Group::new("signals", &SIGNALS.map(|name| (name, 0))),
    ];
    groups.extend(disks);
    groups.extend(links);
    groups
}

const SIGNALS: [&str; 7] =
    ["sigbus", "sigsegv", "sigxfsz", "sigxcpu", "sigpipe", "sighup", "sigill"];

fn disk(name: &str, counted: &DeviceCounters<DiskCounters>, updates: (u64, u64)) -> Group {
    let DeviceCounters { transport, device, .. } = counted;
    let [queue, ..] = transport.queues;
    let counts = [
        ("activate_fails", transport.setup_failures),
        ("cfg_fails", transport.config_failures),
        ("no_avail_buffer", queue.empty_notifications),
        ("event_fails", queue.failures + transport.event_failures),
        ("execute_fails", device.failed),
        ("invalid_reqs_count", device.refused),
        ("flush_count", device.flushes),
        ("queue_event_count", queue.notifications),
        ("rate_limiter_event_count", device.limiter.refills),
        ("update_count", updates.0),
        ("update_fails", updates.1),
        ("read_bytes", device.bytes_read),
        ("write_bytes", device.bytes_written),
        ("read_count", device.reads.count),
        ("write_count", device.writes.count),
        ("rate_limiter_throttled_events", device.limiter.delays),
        // Every request is carried out before the next one.
        ("io_engine_throttled_events", 0),
        ("remaining_reqs_count", device.remaining),
    ];
    Group::new(name, &counts)
        .with_times(&[("read_agg", device.reads), ("write_agg", device.writes)])
}

fn network(name: &str, counted: &DeviceCounters<NetworkCounters>) -> Group {
    let DeviceCounters { transport, device, .. } = counted;
    let [receive, transmit, ..] = transport.queues;
    let NetworkCounters { to_guest, from_guest, backend, .. } = device;
    let (to_limiter, from_limiter) = (device.to_guest_limiter, device.from_guest_limiter);
    let refused = from_guest.dropped.saturating_sub(device.oversized);
    let counts = [
        ("activate_fails", transport.setup_failures),
        ("cfg_fails", transport.config_failures),
        // The address is read-only.
        ("mac_address_updates", 0),
        ("no_rx_avail_buffer", device.buffer_waits),
        ("no_tx_avail_buffer", transmit.empty_notifications),
        ("event_fails", receive.failures + transmit.failures + transport.event_failures),
        ("rx_queue_event_count", receive.notifications),
        ("rx_event_rate_limiter_count", to_limiter.refills),
        // A frame is passed on whole or not at all.
        ("rx_partial_writes", 0),
        ("tx_partial_reads", 0),
        ("rx_rate_limiter_throttled", to_limiter.delays),
        ("rx_tap_event_count", device.events),
        ("rx_bytes_count", to_guest.bytes),
        ("rx_packets_count", to_guest.frames),
        ("rx_fails", to_guest.dropped),
        ("rx_count", to_guest.frames),
        ("tap_read_fails", backend.read_failures),
        ("tap_write_fails", refused),
        ("tx_bytes_count", from_guest.bytes),
        ("tx_malformed_frames", device.oversized),
        ("tx_fails", refused),
        ("tx_count", from_guest.frames),
        ("tx_packets_count", from_guest.frames),
        ("tx_queue_event_count", transmit.notifications),
        ("tx_rate_limiter_event_count", from_limiter.refills),
        ("tx_rate_limiter_throttled", from_limiter.delays),
        ("tx_spoofed_mac_count", device.spoofed),
        ("tx_remaining_reqs_count", device.remaining),
    ];
    Group::new(name, &counts).with_times(&[("tap_write_agg", backend.writes)])
}

fn mmds(service: &firn_net::Counters) -> Group {
    let unusual = service.dropped_fragments + service.dropped_unsupported;
    let counts = [
        ("rx_accepted", service.frames_from_guest),
        ("rx_accepted_err", service.dropped_invalid),
        ("rx_accepted_unusual", unusual),
        // Other frames do not come here.
        ("rx_bad_eth", 0),
        ("rx_count", service.frames_from_guest),
        ("tx_bytes", service.bytes_to_guest),
        ("tx_count", service.frames_to_guest),
        ("tx_errors", 0),
        ("tx_frames", service.frames_to_guest),
        ("connections_created", service.flows_opened),
        ("connections_destroyed", service.flows_opened.saturating_sub(service.flows)),
    ];
    Group::new("mmds", &counts)
}

fn of_vsock(counted: &DeviceCounters<VsockCounters>) -> Group {
    let DeviceCounters { transport, device, .. } = counted;
    let [receive, transmit, event, ..] = transport.queues;
    let counts = [
        ("activate_fails", transport.setup_failures),
        ("cfg_fails", transport.config_failures),
        ("rx_queue_event_fails", receive.failures),
        ("tx_queue_event_fails", transmit.failures),
        ("ev_queue_event_fails", event.failures),
        ("muxer_event_fails", device.poll_failures + transport.event_failures),
        // Only a read or a write can fail for a connection.
        ("conn_event_fails", 0),
        ("rx_queue_event_count", receive.notifications),
        ("tx_queue_event_count", transmit.notifications),
        ("rx_bytes_count", device.bytes_to_guest),
        ("tx_bytes_count", device.bytes_from_guest),
        ("rx_packets_count", device.packets_to_guest),
        ("tx_packets_count", device.packets_from_guest),
        ("conns_added", device.opened),
        ("conns_killed", device.resets),
        ("conns_removed", device.closed),
        // No queue of connections to be killed can get out of step.
        ("killq_resync", 0),
        // A buffer is emptied by writes.
        ("tx_flush_fails", 0),
        ("tx_write_fails", device.write_failures),
        ("rx_read_fails", device.read_failures),
    ];
    Group::new("vsock", &counts)
}

fn of_entropy(counted: &DeviceCounters<EntropyCounters>) -> Group {
    let DeviceCounters { transport, device, .. } = counted;
    let [queue, ..] = transport.queues;
    let counts = [
        ("activate_fails", transport.setup_failures),
        ("entropy_event_fails", queue.failures + transport.event_failures),
        ("entropy_event_count", queue.notifications),
        ("entropy_bytes", device.bytes),
        ("host_rng_fails", device.failures),
        ("entropy_rate_limiter_throttled", device.limiter.delays),
        ("rate_limiter_event_count", device.limiter.refills),
    ];
    Group::new("entropy", &counts)
}

fn of_balloon(counted: &DeviceCounters<BalloonCounters>) -> Group {
    let DeviceCounters { transport, device, .. } = counted;
    let [inflate, deflate, ..] = transport.queues;
    let failures = transport.queues.iter().map(|queue| queue.failures).sum::<u64>();
    let counts = [
        ("activate_fails", transport.setup_failures),
        ("cfg_fails", transport.config_failures),
        ("inflate_count", inflate.notifications),
        ("stats_updates_count", device.statistics),
        ("stats_update_fails", device.statistics_failures),
        ("deflate_count", deflate.notifications),
        ("event_fails", failures + transport.event_failures),
    ];
    Group::new("balloon", &counts)
}

fn of_serial(counters: SerialCounters) -> Group {
    let counts = [
        ("error_count", counters.failures),
        // Each byte is flushed.
        ("flush_count", counters.writes),
        ("missed_read_count", counters.invalid_reads),
        ("missed_write_count", counters.invalid_writes + counters.lost),
        ("read_count", counters.reads),
        ("write_count", counters.writes),
    ];
    Group::new("uart", &counts)
}

fn of_keyboard(counters: KeyboardCounters) -> Group {
    let counts = [
        // An interrupt cannot fail.
        ("error_count", 0),
        ("missed_read_count", counters.invalid_reads),
        ("missed_write_count", counters.invalid_writes),
        ("read_count", counters.reads),
        ("write_count", counters.writes),
        ("reset_count", counters.resets),
    ];
    Group::new("i8042", &counts)
}

fn of_exits(exits: ExitCounters) -> Group {
    let counts = [
        ("exit_io_in", exits.port_reads.count),
        ("exit_io_out", exits.port_writes.count),
        ("exit_mmio_read", exits.mmio_reads.count),
        ("exit_mmio_write", exits.mmio_writes.count),
        ("failures", exits.failures),
    ];
    Group::new("vcpu", &counts).with_times(&[
        ("exit_io_in_agg", exits.port_reads),
        ("exit_io_out_agg", exits.port_writes),
        ("exit_mmio_read_agg", exits.mmio_reads),
        ("exit_mmio_write_agg", exits.mmio_writes),
    ])
}
