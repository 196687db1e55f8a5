use std::net::Ipv4Addr;
use std::time::Duration;

use firn_required::{TapDevice, in_own_network};

use super::super::super::testing::Guest;
use super::super::{Net, Network, NetworkConfig, NetworkEnd};
use super::*;

const HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const CONFIG: NetworkConfig = NetworkConfig { mac: [2, 0, 0, 0, 0, 7], mtu: 1500 };

/// Runs a test in a network namespace of its own, with the tap device `tap0`.
fn with_tap(test: impl FnOnce() + Send) {
    in_own_network(|| {
        let _device = TapDevice::create("tap0", HOST).unwrap();
        test();
    });
}

/// "Which address has the host?", of ARP, from the guest.
fn question() -> Vec<u8> {
    let ethernet = [&[0xff; 6][..], &CONFIG.mac, &[8, 6]].concat();
    let arp = [0, 1, 8, 0, 6, 4, 0, 1];
    let (guest, host) = (GUEST.octets(), HOST.octets());
    [&ethernet[..], &arp, &CONFIG.mac, &guest, &[0; 6], &host].concat()
}

#[test]
fn the_hosts_kernel_answers_the_guest() {
    with_tap(|| {
        let tap = open_tap("tap0").unwrap();
        assert!(matches!(open_tap("tap0"), Err(OpenTapError::Busy(_))));
        let network = Network { end: Some(NetworkEnd::Tap(tap)), ..Network::default() };
        let mut guest = Guest::started(Net::new(CONFIG, network).unwrap());
        for _ in 0..4 {
            guest.add(0, &[], &[2048]);
        }
        let answer = loop {
            // The kernel sends packets of its own, such as router solicitations.
            match guest.used(0) {
                Some(used) if used.data[HEADER_LEN + 12..][..2] == [8, 6] => break used.data,
                Some(_) => {
                    guest.add(0, &[], &[2048]);
                }
                // It drops its answer until it has seen that the device is up.
                None => {
                    guest.request(1, &[&[0; HEADER_LEN], &question()], &[]);
                    std::thread::sleep(Duration::from_millis(10));
                    guest.run();
                }
            }
        };
        let (header, frame) = answer.split_at(HEADER_LEN);
        assert_eq!(header[10..], [1, 0]);
        assert_eq!(frame[..6], CONFIG.mac);
        // A reply, with the host's address.
        assert_eq!(frame[20..22], [0, 2]);
        assert_eq!(frame[28..32], HOST.octets());
    });
}

#[test]
fn devices_that_cannot_be_used_are_named_with_the_reason() {
    with_tap(|| {
        for name in ["", "a/b", "a-name-of-16-byt", "a\0b"] {
            assert!(matches!(open_tap(name), Err(OpenTapError::Name(_))), "{name:?}");
        }
        let error = open_tap("tap1").unwrap_err().to_string();
        assert!(error.contains("ip tuntap add dev tap1 mode tap"), "{error}");
        assert!(matches!(open_tap("lo"), Err(OpenTapError::NotTap(_))));
    });
}
