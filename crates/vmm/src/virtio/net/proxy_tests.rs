use std::net::Ipv4Addr;

use firn_net::{Broker, Policy};

use super::super::super::testing::Guest;
use super::super::{Net, Network, NetworkEnd};
use super::*;

const CONFIG: NetworkConfig = NetworkConfig { mac: [2, 0, 0, 0, 0, 7], mtu: 1500 };

fn network() -> Network {
    let broker = Broker::start(Policy::default(), Vec::new()).unwrap();
    Network { end: Some(NetworkEnd::Proxy(broker)), ..Network::default() }
}

#[test]
fn headers_pass_unchanged() {
    let header = FrameHeader {
        flags: 1,
        gso_type: 4,
        hdr_len: 0x0102,
        gso_size: 0x0304,
        csum_start: 0x0506,
        csum_offset: 0x0708,
    };
    let bytes = bytes_of(header);
    assert_eq!(bytes, [1, 4, 2, 1, 4, 3, 6, 5, 8, 7, 1, 0]);
    assert_eq!(header_of(&bytes), header);
}

#[test]
fn the_gateway_answers_the_guest() {
    let mut guest = Guest::started(Net::new(CONFIG, network()).unwrap());
    guest.add(0, &[], &[2048]);
    // "Which address has the gateway?", of ARP.
    let ethernet = [&[0xff; 6][..], &CONFIG.mac, &[8, 6]].concat();
    let arp = [0, 1, 8, 0, 6, 4, 0, 1];
    let (own, gateway) = (Ipv4Addr::new(100, 64, 0, 2), Ipv4Addr::new(100, 64, 0, 1));
    let question =
        [&ethernet[..], &arp, &CONFIG.mac, &own.octets(), &[0; 6], &gateway.octets()].concat();
    guest.request(1, &[&[0; HEADER_LEN], &question], &[]);
    let answer = guest.used(0).expect("an answer in the same turn").data;
    let frame = &answer[HEADER_LEN..];
    assert_eq!((&frame[..6], &frame[20..22]), (&CONFIG.mac[..], &[0, 2][..]));
    assert_eq!(frame[28..32], gateway.octets());

    // A clone has the same addresses.
    let state = guest.save();
    let mut thawed = guest.restored(Net::new(CONFIG, network()).unwrap(), &state);
    thawed.add(0, &[], &[2048]);
    thawed.request(1, &[&[0; HEADER_LEN], &question], &[]);
    assert_eq!(thawed.used(0).unwrap().data, answer);
}
