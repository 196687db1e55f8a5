use std::collections::VecDeque;
use std::sync::Arc;

use firn_net::NetworkState;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::super::testing::{Guest, NEEDS_RESET, STATUS};
use super::super::{RateLimit, RestoreDeviceError, TokenBucket};
use super::backend::Traffic;
use super::*;

pub(super) const CONFIG: NetworkConfig = NetworkConfig { mac: [2, 0, 0, 0, 0, 7], mtu: 1500 };
const MERGES: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;

/// A backend whose other end is in the test.
#[derive(Clone, Debug)]
pub(super) struct Wire {
    to_guest: Arc<Mutex<VecDeque<Vec<u8>>>>,
    from_guest: Arc<Mutex<Vec<Vec<u8>>>>,
    features: Arc<Mutex<Vec<u64>>>,
    event: Arc<OwnedFd>,
    packet: Option<Vec<u8>>,
}

impl Wire {
    pub(super) fn new() -> Self {
        Self {
            to_guest: Arc::default(),
            from_guest: Arc::default(),
            features: Arc::default(),
            event: Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()),
            packet: None,
        }
    }

    pub(super) fn send(&self, frame: &[u8]) {
        self.to_guest.lock().push_back([&[0; HEADER_LEN], frame].concat());
        rustix::io::write(&*self.event, &1_u64.to_ne_bytes()).unwrap();
    }

    pub(super) fn device(&self) -> Net {
        self.limited(None, None)
    }

    fn limited(&self, to_guest: Option<RateLimit>, from_guest: Option<RateLimit>) -> Net {
        let limiter = |limit: Option<RateLimit>| limit.map(|l| RateLimiter::new(l).unwrap());
        let backend = Some(Box::new(self.clone()) as _);
        Net::with_backend(CONFIG, backend, limiter(to_guest), limiter(from_guest)).unwrap()
    }

    /// The frames of the guest, without their headers.
    pub(super) fn received(&self) -> Vec<Vec<u8>> {
        let packets = std::mem::take(&mut *self.from_guest.lock());
        packets.into_iter().map(|packet| packet[HEADER_LEN..].to_vec()).collect()
    }
}

impl NetworkBackend for Wire {
    fn start(&mut self, features: u64) -> io::Result<()> {
        self.features.lock().push(features);
        Ok(())
    }

    fn event_sources(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        vec![(self.event.as_fd(), EventFlags::ET)]
    }

    fn packet(&mut self) -> Option<&mut [u8]> {
        if self.packet.is_none() {
            self.packet = self.to_guest.lock().pop_front();
        }
        self.packet.as_deref_mut()
    }

    fn taken(&mut self) {
        self.packet = None;
    }

    fn transmit(&mut self, packets: &[&[u8]]) -> Traffic {
        let mut traffic = Traffic::default();
        for packet in packets {
            self.from_guest.lock().push(packet.to_vec());
            traffic.count(u64_of(packet.len() - HEADER_LEN), true);
        }
        traffic
    }
}

pub(super) fn send(guest: &mut Guest<Net>, frame: &[u8]) {
    assert!(guest.request(1, &[&[0; HEADER_LEN], frame], &[]).is_empty());
}

/// Offers buffers for frames to the guest.
pub(super) fn offer(guest: &mut Guest<Net>, count: u16, len: u32) {
    for _ in 0..count {
        guest.add(0, &[], &[len]);
    }
}

/// The next frame for the guest and its header.
pub(super) fn next(guest: &mut Guest<Net>) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut used = guest.used(0)?.data;
    let frame = used.split_off(HEADER_LEN);
    Some((used, frame))
}

#[test]
fn frames_pass_in_both_directions() {
    let wire = Wire::new();
    let mut guest = Guest::started(wire.device());
    send(&mut guest, b"to the host");
    assert_eq!(wire.received(), [b"to the host"]);

    guest.add(0, &[], &[2048]);
    wire.send(b"to the guest");
    guest.run();
    let (header, frame) = next(&mut guest).unwrap();
    assert_eq!(frame, b"to the guest");
    assert_eq!(header[NUM_BUFFERS..], [1, 0]);
    let features = wire.features.lock().clone();
    assert_eq!(features.len(), 1);
    assert_eq!(features[0] & OFFLOADS, OFFLOADS);
    let one = |bytes| Traffic { frames: 1, bytes, dropped: 0 };
    let counters = guest.transport().device().counters();
    assert_eq!((counters.to_guest, counters.from_guest), (one(12), one(11)));
}

#[test]
fn frames_wait_until_the_guest_has_buffers() {
    let wire = Wire::new();
    let mut guest = Guest::started(wire.device());
    (0..3_u8).for_each(|number| wire.send(&[number; 60]));
    guest.run();
    assert!(next(&mut guest).is_none());
    for number in 0..3_u8 {
        guest.add(0, &[], &[2048]);
        guest.kick(0);
        assert_eq!(next(&mut guest).unwrap().1, [number; 60]);
    }
    assert!(next(&mut guest).is_none());
    // Before the first buffer, and after each but the last.
    assert_eq!(guest.transport().device().counters().buffer_waits, 3);
    guest.set(0x50, 1);
    guest.run();
    let queue = guest.transport().counters().queues[1];
    assert_eq!((queue.notifications, queue.empty_notifications), (1, 1));
}

#[test]
fn frames_from_another_address_pass_and_are_counted() {
    let wire = Wire::new();
    let mut guest = Guest::started(wire.device());
    let from = |address: [u8; 6]| [[0xff; 6].as_slice(), &address, &[0; 48]].concat();
    let frames = [from(CONFIG.mac), from([1; 6])];
    frames.iter().for_each(|frame| send(&mut guest, frame));
    assert_eq!(wire.received(), frames);
    assert_eq!(guest.transport().device().counters().spoofed, 1);
}

#[test]
fn a_large_frame_takes_several_buffers_and_is_seen_at_once() {
    let wire = Wire::new();
    let mut guest = Guest::started(wire.device());
    let frame: Vec<u8> = (0..5000_u32).map(|byte| byte.to_le_bytes()[0]).collect();
    wire.send(&frame);
    for _ in 0..2 {
        guest.add(0, &[], &[1500]);
        guest.kick(0);
        // Not before there is room for all of it.
        assert!(next(&mut guest).is_none());
    }
    offer(&mut guest, 3, 1500);
    guest.kick(0);
    let (header, mut found) = next(&mut guest).unwrap();
    assert_eq!(header[NUM_BUFFERS..], [4, 0]);
    (0..3).for_each(|_| found.extend(guest.used(0).unwrap().data));
    assert!(found == frame);
    // The fifth buffer is for the next frame.
    assert_eq!(guest.used(0), None);
    wire.send(b"next");
    guest.run();
    assert_eq!(next(&mut guest).unwrap().1, b"next");
}

#[test]
fn a_frame_that_never_fits_is_dropped() {
    let wire = Wire::new();
    let mut guest = Guest::started_without(wire.device(), MERGES);
    guest.add(0, &[], &[100]);
    wire.send(&[1; 200]);
    wire.send(&[2; 60]);
    guest.run();
    assert_eq!(next(&mut guest).unwrap().1, [2; 60]);
    assert_eq!(guest.transport().device().counters().to_guest.dropped, 1);

    // With merging, not even all buffers of the queue are enough.
    let wire = Wire::new();
    let mut guest = Guest::started(wire.device());
    offer(&mut guest, 256, 16);
    wire.send(&[1; 5000]);
    wire.send(&[2; 60]);
    guest.run();
    let (header, mut frame) = next(&mut guest).unwrap();
    assert_eq!(header[NUM_BUFFERS..], [5, 0]);
    (0..4).for_each(|_| frame.extend(guest.used(0).unwrap().data));
    assert_eq!(frame, [2; 60]);
}

#[test]
fn a_packet_without_a_header_stops_the_device() {
    let wire = Wire::new();
    let mut guest = Guest::started(wire.device());
    guest.add(1, &[&[0; HEADER_LEN - 1]], &[]);
    guest.kick(1);
    assert_ne!(guest.get(STATUS) & NEEDS_RESET, 0);
    assert_eq!(wire.received(), Vec::<Vec<u8>>::new());
}

#[test]
fn a_frame_that_is_too_large_is_dropped() {
    let wire = Wire::new();
    let mut guest = Guest::started(wire.device());
    let part = [0; 8192];
    let parts = [&part[..]; 9];
    guest.request(1, &parts, &[]);
    send(&mut guest, b"next");
    assert_eq!(wire.received(), [b"next"]);
    let counters = guest.transport().device().counters();
    assert_eq!((counters.from_guest.dropped, counters.oversized), (1, 1));
}

#[test]
fn frames_beyond_the_limit_wait_for_the_timer() {
    let wire = Wire::new();
    let limit = Some(RateLimit { bytes: None, operations: Some(TokenBucket::per_second(50)) });
    let mut guest = Guest::started(wire.limited(limit, limit));
    for number in 0..60_u8 {
        guest.add(0, &[], &[2048]);
        wire.send(&[number]);
        guest.add(1, &[&[0; HEADER_LEN], &[number]], &[]);
    }
    guest.kick(1);
    assert!(wire.from_guest.lock().len() < 60);
    let mut frames = Vec::new();
    while frames.len() < 60 || wire.from_guest.lock().len() < 60 {
        guest.run();
        frames.extend(std::iter::from_fn(|| next(&mut guest)).map(|(_, frame)| frame));
    }
    let expected: Vec<_> = (0..60_u8).map(|number| vec![number]).collect();
    assert_eq!(frames, expected);
    assert_eq!(wire.received(), expected);
}

#[test]
fn no_frame_is_stuck_after_100_freezes() {
    let wire = Wire::new();
    let mut guest = Guest::started(wire.device());
    offer(&mut guest, 8, 2048);
    guest.kick(0);
    for number in 0..100_u8 {
        // Frames on both ways, of which the device was not notified.
        wire.send(&[number]);
        guest.add(1, &[&[0; HEADER_LEN], &[number]], &[]);
        let state = guest.save();
        let mut thawed = guest.restored(wire.device(), &state);
        assert_eq!(wire.received(), [[number]]);
        assert_eq!(next(&mut thawed).unwrap().1, [number]);
        assert!(thawed.used(1).is_some());
        // And once more by events.
        send(&mut thawed, b"alive");
        assert_eq!(wire.received(), [b"alive"]);
        thawed.add(0, &[], &[2048]);
        guest = thawed;
    }
}

#[test]
fn the_link_is_down_without_a_backend() {
    let status = |device: Net| device.config()[6];
    assert_eq!(status(Wire::new().device()), 1);
    let without = || Net::new(CONFIG, Network::default()).unwrap();
    assert_eq!(status(without()), 0);
    assert_eq!(without().config()[..6], CONFIG.mac);
    assert_eq!(without().config()[10..], 1500_u16.to_le_bytes());
    let mut guest = Guest::started(without());
    send(&mut guest, b"lost");
    assert_eq!(guest.transport().device().counters().from_guest.dropped, 1);
}

#[test]
fn the_state_of_another_device_is_refused() {
    let mut device = Wire::new().device();
    let state = device.save();
    assert!(device.restore(&state, true).is_ok());
    let other = NetState { mac: [2; 6], mtu: 1500, flows: NetworkState::default() };
    for state in [DeviceState::Rng, DeviceState::Net(other)] {
        let refused = device.restore(&state, true);
        assert!(matches!(refused, Err(RestoreDeviceError::OtherDevice { id: 1 })), "{refused:?}");
    }
}
