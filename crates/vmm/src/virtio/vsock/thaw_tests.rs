use super::*;

#[test]
fn connections_end_with_a_thaw_and_listeners_stay() {
    let mut peer = Peer::new();
    let (_client, old) = peer.connect();
    // In flight to the host at the freeze.
    let lost = peer.header(old, Op::Data, 0, 4).to_bytes();
    peer.guest.add(TX, &[&lost, b"lost"], &[]);

    let mut thawed = peer.thawed();
    assert_eq!(thawed.connections(), 0);
    assert_eq!(thawed.guest.used(EVENT).unwrap().data, TRANSPORT_RESET);
    assert!(thawed.guest.interrupts() > 0);
    while thawed.guest.used(TX).is_some() {}
    thawed.expect(old, Op::Reset, 0);

    // No request is sent before the guest has ended its connections.
    let mut client = thawed.client();
    client.write_all(b"CONNECT 1024\n").unwrap();
    thawed.guest.run();
    thawed.fill(1);
    thawed.expect_nothing();

    let notifications = thawed.guest.notifications;
    thawed.guest.add(EVENT, &[], &[4]);
    thawed.guest.kick(EVENT);
    assert_eq!(
        thawed.guest.notifications,
        notifications + 1,
        "the device requested a notification"
    );
    let new = thawed.expect_request();
    assert_ne!(new.host, old.host, "the pair of ports is new to the guest");
    thawed.send(new, Op::Response, 0, &[]);
    assert_eq!(read_line(&mut client), format!("OK {}\n", new.host));
    client.write_all(b"hello again").unwrap();
    thawed.guest.run();
    assert_eq!(thawed.expect(new, Op::Data, 0), b"hello again");
    assert_eq!(thawed.guest.used(EVENT), None, "one event is sent");

    // A second thaw.
    let mut again = thawed.thawed();
    assert_eq!(again.guest.used(EVENT).unwrap().data, TRANSPORT_RESET);
    again.guest.add(EVENT, &[], &[4]);
    again.guest.kick(EVENT);
    again.connect();
}

#[test]
fn a_thawed_guest_without_event_buffers_gets_the_event_later() {
    let mut peer = Peer::without_buffers();
    peer.fill(8);
    let _old = peer.connect();
    let mut thawed = peer.thawed();
    let mut client = thawed.client();
    client.write_all(b"CONNECT 1024\n").unwrap();
    thawed.guest.run();
    thawed.expect_nothing();
    thawed.guest.add(EVENT, &[], &[4]);
    thawed.guest.kick(EVENT);
    assert_eq!(thawed.guest.used(EVENT).unwrap().data, TRANSPORT_RESET);
    thawed.expect_nothing();
    thawed.guest.add(EVENT, &[], &[4]);
    thawed.guest.kick(EVENT);
    thawed.expect_request();
}

/// After an event, a request waits until the guest has handled it.
#[test]
fn a_guest_without_connections_gets_no_event_and_the_first_request_at_once() {
    let ended_by_the_host = || {
        let mut peer = Peer::new();
        let (client, ends) = peer.connect();
        drop(client);
        peer.guest.run();
        peer.expect(ends, Op::Shutdown, SHUTDOWN_BOTH);
        (peer, ends)
    };
    let (peer, _) = ended_by_the_host();
    let mut thawed = peer.thawed();
    assert_eq!(thawed.guest.used(EVENT).unwrap().data, TRANSPORT_RESET, "the guest has not ended");
    let mut again = thawed.thawed();
    assert_eq!(again.guest.used(EVENT).unwrap().data, TRANSPORT_RESET, "and not handled the event");

    // A connection that the guest has requested, and a reset that it has no buffer for.
    let mut asking = Peer::new();
    let _server = asking.listen(52);
    asking.send(Ends { host: 52, guest: 9 }, Op::Request, 0, &[]);
    assert_eq!(asking.thawed().guest.used(EVENT).unwrap().data, TRANSPORT_RESET);
    let mut refused = Peer::without_buffers();
    refused.guest.add(EVENT, &[], &[4]);
    refused.send(Ends { host: 53, guest: 9 }, Op::Data, 0, &[]);
    assert_eq!(refused.thawed().guest.used(EVENT).unwrap().data, TRANSPORT_RESET);

    let (mut peer, ends) = ended_by_the_host();
    peer.send(ends, Op::Reset, 0, &[]);
    let mut thawed = peer.thawed();
    assert_eq!(thawed.guest.used(EVENT), None);
    thawed.connect();
}

#[test]
fn a_guest_that_had_not_started_gets_no_event() {
    let dir = TempDir::new().unwrap();
    let guest = Guest::new(device(&dir).0);
    let other = TempDir::new().unwrap();
    let (device, broker) = device(&other);
    let mut thawed = guest.restored(device, &guest.save());
    thawed.negotiate(0);
    thawed.set_up_queues();
    thawed.set(STATUS, 15);
    let mut peer = Peer { guest: thawed, broker, dir: other, buf_alloc: 100, fwd_cnt: 0 };
    peer.fill(2);
    peer.guest.add(EVENT, &[], &[4]);
    peer.guest.kick(EVENT);
    assert_eq!(peer.guest.used(EVENT), None);
    peer.connect();
}
