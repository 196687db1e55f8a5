//! The policy, as the guest sees it.

use std::io::ErrorKind;
use std::net::{TcpStream, UdpSocket};
use std::time::Duration;

use crate::servers::{echo, serve};
use crate::world::{HOST_V4, HOST_V6, Settings, World, is_possible};

#[test]
fn an_address_that_is_not_allowed_is_unreachable() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings { rules: &[], ..Settings::default() });
    let port = serve(&world, HOST_V4, echo);
    world.guest.run(move || {
        // Special, and the host's own too.
        let mapped = format!("[::ffff:{HOST_V4}]:{port}");
        for address in [format!("{HOST_V4}:{port}"), format!("10.0.0.1:{port}"), mapped] {
            let error = TcpStream::connect(&address).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::HostUnreachable, "{address}");
        }
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect((HOST_V4, port)).unwrap();
        socket.send(b"x").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let error = socket.recv(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::HostUnreachable);
    });
    let denied = world.policy.counts().into_iter().find(|count| count.rule == "default deny");
    assert_eq!(denied.unwrap().matched, 4);
}

#[test]
fn the_first_rule_that_matches_decides() {
    if !is_possible() {
        return;
    }
    let rules = &["deny:192.0.2.1:9", "allow:192.0.2.0/24", "deny:2001:db8::1"];
    let world = World::new(Settings { rules, ..Settings::default() });
    world.guest.run(|| {
        let kind = |address, port| TcpStream::connect((address, port)).unwrap_err().kind();
        assert_eq!(kind(HOST_V4, 9), ErrorKind::HostUnreachable);
        assert_eq!(kind(HOST_V4, 10), ErrorKind::ConnectionRefused);
        // ICMPv6 has a code of its own for it.
        assert_eq!(kind(HOST_V6, 10), ErrorKind::PermissionDenied);
    });
    let matched: Vec<u64> = world.policy.counts().iter().map(|count| count.matched).collect();
    assert_eq!(matched, [1, 1, 1, 0, 0]);
}

/// A global address is allowed, unless it is the host's own.
#[test]
fn the_hosts_own_addresses_are_denied() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings { rules: &[], ..Settings::default() });
    world.host.run(|| {
        let add = ["addr", "add", "9.9.9.1/24", "dev", "lo"];
        assert!(std::process::Command::new("ip").args(add).status().unwrap().success());
    });
    world.guest.run(|| {
        let kind = |address| TcpStream::connect((address, 9)).unwrap_err().kind();
        assert_eq!(kind("9.9.9.1"), ErrorKind::HostUnreachable);
        // Allowed, and without a route.
        assert_eq!(kind("8.8.8.8"), ErrorKind::NetworkUnreachable);
    });
    let counts = world.policy.counts();
    assert_eq!((counts[0].matched, counts[1].matched), (1, 1), "{counts:?}");
}
