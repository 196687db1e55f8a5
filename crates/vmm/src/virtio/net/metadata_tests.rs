use firn_net::{MetadataConfig, MetadataStore};

use super::super::super::device::VirtioDevice;
use super::super::super::testing::Guest;
use super::super::tests::{CONFIG, Wire, next, offer, send};
use super::super::{Metadata, Net, Network};
use super::*;

const ADDRESS: [u8; 4] = [169, 254, 169, 254];
const OWN: [u8; 4] = [10, 0, 0, 2];

fn metadata() -> Metadata {
    let store = MetadataStore::default();
    store.put(serde_json::json!({"name": "Ada"})).unwrap();
    Metadata { config: MetadataConfig::default(), store }
}

/// A device whose frames for other addresses go to a test.
fn before(wire: &Wire) -> Net {
    let service = UserNetwork::metadata(CONFIG, metadata()).unwrap();
    let backend = Intercepted::new(ADDRESS.into(), service, Some(Box::new(wire.clone())));
    Net::with_backend(CONFIG, Some(Box::new(backend)), None, None).unwrap()
}

/// A device without another backend.
fn alone() -> Net {
    Net::new(CONFIG, Network { metadata: Some(metadata()), ..Network::default() }).unwrap()
}

/// Asks for the Ethernet address of `target`.
fn question(target: [u8; 4]) -> Vec<u8> {
    let ethernet = [&[0xff; 6][..], &CONFIG.mac, &ARP].concat();
    let arp = [0, 1, 8, 0, 6, 4, 0, 1];
    [&ethernet[..], &arp, &CONFIG.mac, &OWN, &[0; 6], &target].concat()
}

/// A SYN to port 80 of `target`, by any router.
fn syn(target: [u8; 4]) -> Vec<u8> {
    let ethernet = [&[2, 0, 0, 0, 0, 99][..], &CONFIG.mac, &IPV4].concat();
    let mut ip = [&[0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0][..], &OWN, &target].concat();
    let tcp = [0x9c, 0x40, 0, 80, 0, 0, 3, 232, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0];
    let sum: u32 = ip.as_chunks().0.iter().map(|pair| u32::from(u16::from_be_bytes(*pair))).sum();
    let folded = u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    ip[10..12].copy_from_slice(&(!folded).to_be_bytes());
    [&ethernet[..], &ip, &tcp].concat()
}

/// Sends a frame whose checksum the host completes.
fn send_tcp(guest: &mut Guest<Net>, frame: &[u8]) {
    let mut header = [0; HEADER_LEN];
    header[0] = 1;
    guest.request(1, &[&header, frame], &[]);
}

/// TCP flags of a frame from `ADDRESS`.
fn flags(frame: &[u8]) -> u8 {
    assert_eq!((&frame[..6], &frame[26..30]), (&CONFIG.mac[..], &ADDRESS[..]));
    frame[47]
}

const SYN_ACK: u8 = 0x12;
const RST_ACK: u8 = 0x14;

#[test]
fn frames_for_the_service_do_not_reach_the_backend() {
    let wire = Wire::new();
    let mut guest = Guest::started(before(&wire));
    offer(&mut guest, 4, 2048);
    send(&mut guest, &question(ADDRESS));
    let (_, answer) = next(&mut guest).unwrap();
    assert_eq!((&answer[..6], &answer[20..22]), (&CONFIG.mac[..], &[0, 2][..]));
    assert_eq!(answer[28..32], ADDRESS);
    send_tcp(&mut guest, &syn(ADDRESS));
    assert_eq!(flags(&next(&mut guest).unwrap().1), SYN_ACK);
    assert_eq!(wire.received(), Vec::<Vec<u8>>::new());

    // All others do, also those that are too short to tell.
    let others =
        [question([10, 0, 0, 1]), syn([10, 0, 0, 1]), syn(ADDRESS)[..33].to_vec(), vec![8]];
    for frame in &others {
        send(&mut guest, frame);
    }
    assert_eq!(wire.received(), others);
    assert!(next(&mut guest).is_none());
}

#[test]
fn frames_of_both_arrive_in_turn() {
    let wire = Wire::new();
    let mut guest = Guest::started(before(&wire));
    // The backend's waits for a buffer when the service has one.
    wire.send(b"from the backend");
    guest.run();
    send(&mut guest, &question(ADDRESS));
    offer(&mut guest, 2, 2048);
    guest.kick(0);
    assert_eq!(next(&mut guest).unwrap().1, b"from the backend");
    assert_eq!(next(&mut guest).unwrap().1[28..32], ADDRESS);
    wire.send(b"again");
    offer(&mut guest, 1, 2048);
    guest.run();
    assert_eq!(next(&mut guest).unwrap().1, b"again");
}

#[test]
fn a_device_without_a_backend_serves_metadata() {
    assert_eq!(alone().config()[6], 1, "the link is up");
    let mut guest = Guest::started(alone());
    offer(&mut guest, 2, 2048);
    send_tcp(&mut guest, &syn([10, 0, 0, 1]));
    assert!(next(&mut guest).is_none());
    send_tcp(&mut guest, &syn(ADDRESS));
    assert_eq!(flags(&next(&mut guest).unwrap().1), SYN_ACK);
}

#[test]
fn a_clone_has_its_connections_to_the_service_reset() {
    let wire = Wire::new();
    let mut guest = Guest::started(before(&wire));
    offer(&mut guest, 1, 2048);
    send_tcp(&mut guest, &syn(ADDRESS));
    assert_eq!(flags(&next(&mut guest).unwrap().1), SYN_ACK);
    let state = guest.save();
    // Without a service the state is one of any network.
    let mut thawed = guest.restored(Wire::new().device(), &state);
    offer(&mut thawed, 1, 2048);
    thawed.kick(0);
    assert!(next(&mut thawed).is_none());
    // Whatever the service of the clone has as a backend.
    for device in [before(&Wire::new()), alone()] {
        let mut thawed = guest.restored(device, &state);
        offer(&mut thawed, 1, 2048);
        thawed.kick(0);
        assert_eq!(flags(&next(&mut thawed).unwrap().1), RST_ACK);
    }
}
