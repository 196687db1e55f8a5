use std::net::Ipv4Addr;
use std::time::Duration;

use firn_net::{Broker, Policy};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

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
    assert_eq!(bytes_of(header), [1, 4, 2, 1, 4, 3, 6, 5, 8, 7, 1, 0]);
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

/// A device whose broker answers nothing, the broker's end, and its resets.
fn silent() -> (Net, OwnedFd, PendingResets) {
    let (broker, monitor) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let resets = PendingResets::default();
    let end = Some(NetworkEnd::Proxy(monitor));
    let network = Network { end, resets: resets.clone(), ..Network::default() };
    (Net::new(CONFIG, network).unwrap(), broker, resets)
}

/// A frame with the first segment of a connection from `port` to 192.0.2.1:80.
fn syn(port: u16) -> Vec<u8> {
    let mut ip = [0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 100, 64, 0, 2, 192, 0, 2, 1];
    let (words, _) = ip.as_chunks::<2>();
    let sum: u32 = words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&(!u16::try_from(folded).unwrap()).to_be_bytes());
    let mut tcp = [0; 20];
    tcp[..2].copy_from_slice(&port.to_be_bytes());
    tcp[3] = 80;
    tcp[4..8].copy_from_slice(&u32::from(port).to_be_bytes());
    (tcp[12], tcp[13]) = (0x50, 2);
    [&[2, 0x66, 0x69, 0x72, 0x6e, 1][..], &CONFIG.mac, &[8, 0], &ip, &tcp].concat()
}

/// The answer of the guest to the question for its address.
fn own_address() -> Vec<u8> {
    let (own, gateway) = ([100, 64, 0, 2], [100, 64, 0, 1]);
    let to = [2, 0x66, 0x69, 0x72, 0x6e, 1];
    let arp = [0, 1, 8, 0, 6, 4, 0, 2];
    [&to[..], &CONFIG.mac, &[8, 6], &arp, &CONFIG.mac, &own, &to, &gateway].concat()
}

/// As many resets as there are buffers are in the queue before the guest runs, and the others
/// follow as it returns buffers. It has handled all of them when it answers what comes last.
#[test]
fn resets_lie_in_the_queue_before_the_guest_runs() {
    let (device, _broker, _) = silent();
    let mut guest = Guest::started(device);
    (1..=300).for_each(|port| {
        guest.request(1, &[&[0; HEADER_LEN], &syn(port)], &[]);
    });
    (0..256).for_each(|_| _ = guest.add(0, &[], &[2048]));
    guest.kick(0);
    let state = guest.save();

    let (device, _broker, resets) = silent();
    let mut thawed = guest.restored(device, &state);
    let mut ports = Vec::new();
    let mut take = |thawed: &mut Guest<Net>| {
        let mut others = Vec::new();
        while let Some(used) = thawed.used(0) {
            let frame = used.data[HEADER_LEN..].to_vec();
            if frame[12..14] == [8, 0] {
                // A reset that acknowledges the SYN, which is what SYN-SENT accepts.
                assert_eq!(frame[47], 0x14);
                let port = u16::from_be_bytes([frame[36], frame[37]]);
                assert_eq!(frame[42..46], (u32::from(port) + 1).to_be_bytes());
                ports.push(port);
            } else {
                others.push(frame);
            }
        }
        (ports.len(), others)
    };
    // Without a step of the event loop.
    assert_eq!(take(&mut thawed), (256, Vec::new()));
    assert_eq!(resets.wait(Duration::ZERO), Err(300));
    (0..40).for_each(|_| _ = thawed.add(0, &[], &[2048]));
    thawed.kick(0);
    assert_eq!(take(&mut thawed), (296, Vec::new()));
    (0..40).for_each(|_| _ = thawed.add(0, &[], &[2048]));
    thawed.kick(0);
    let (count, others) = take(&mut thawed);
    assert_eq!((count, others.len()), (300, 1));
    // "Which address have you?", of ARP.
    assert_eq!(others[0][12..22], [8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    assert_eq!(resets.wait(Duration::ZERO), Err(300));
    thawed.request(1, &[&[0; HEADER_LEN], &own_address()], &[]);
    assert_eq!(resets.wait(Duration::ZERO), Ok(()));
    ports.sort_unstable();
    assert_eq!(ports, (1..=300).collect::<Vec<u16>>());
}
