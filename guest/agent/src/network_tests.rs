use firn_required::{TapDevice, in_own_network};

use super::*;

/// The addresses and routes of a network namespace, from /proc.
fn read(file: &str) -> String {
    fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap()
}

#[test]
fn an_interface_gets_addresses_in_place_of_earlier_ones() {
    in_own_network(|| {
        let _device = TapDevice::create(INTERFACE, Ipv4Addr::new(192, 0, 2, 1)).unwrap();
        let mut addresses = NetworkAddresses {
            address: Ipv4Addr::new(10, 1, 2, 3),
            prefix: 30,
            gateway: Some(Ipv4Addr::new(10, 1, 2, 1)),
            dns: None,
            ipv6: None,
        };
        set_addresses(INTERFACE, &addresses).unwrap();
        let table = read("fib_trie");
        assert!(table.contains("10.1.2.3") && !table.contains("192.0.2.1"), "{table}");
        // Gateway, and mask of the network, as the processor stores them.
        let routes = read("route");
        assert!(routes.contains("0102010A") && routes.contains("FCFFFFFF"), "{routes}");
        // Again, with another gateway, and with another address.
        set_addresses(INTERFACE, &addresses).unwrap();
        addresses.gateway = Some(Ipv4Addr::new(10, 1, 2, 2));
        set_addresses(INTERFACE, &addresses).unwrap();
        let routes = read("route");
        let first = routes.lines().find(|line| line.contains("02010A")).unwrap();
        assert!(first.contains("0202010A"), "{routes}");
        addresses.address = Ipv4Addr::new(172, 16, 0, 9);
        addresses.gateway = None;
        addresses.prefix = 0;
        set_addresses(INTERFACE, &addresses).unwrap();
        let routes = read("route");
        assert!(!routes.contains("02010A"), "{routes}");
        assert!(set_addresses("eth9", &addresses).is_err());

        // A host on the link, the same again, another, and none.
        let mut earlier = None;
        for host in [Some([169, 254, 169, 254]), Some([169, 254, 169, 254]), Some([169, 254, 1, 1])]
        {
            let host = host.map(Ipv4Addr::from);
            set_host_route(INTERFACE, earlier, host).unwrap();
            earlier = host;
        }
        let routes = read("route");
        let first = routes.lines().find(|line| line.contains("0101FEA9")).unwrap();
        assert!(first.contains("FFFFFFFF") && !routes.contains("FEA9FEA9"), "{routes}");
        set_host_route(INTERFACE, earlier, None).unwrap();
        assert!(!read("route").contains("0101FEA9"));
        // It is gone already.
        set_host_route(INTERFACE, earlier, None).unwrap();
        assert!(set_host_route("eth9", None, earlier).is_err());

        let address = "fd00::2".parse().unwrap();
        let gateway = "fd00::1".parse().unwrap();
        addresses.address = Ipv4Addr::new(172, 16, 0, 10);
        addresses.ipv6 = Some(Ipv6Addresses { address, prefix: 64, gateway });
        set_addresses(INTERFACE, &addresses).unwrap();
        let table = read("if_inet6");
        let line = table.lines().find(|line| line.starts_with("fd000000")).unwrap();
        assert!(line.contains(" 40 ") && line.ends_with(INTERFACE), "{line}");
        let routes = read("ipv6_route");
        assert!(routes.contains("fd000000000000000000000000000001"), "{routes}");
        set_addresses(INTERFACE, &addresses).unwrap();
    });
}

#[test]
fn an_interface_without_an_address_gets_no_route() {
    in_own_network(|| {
        let _device = TapDevice::create(INTERFACE, Ipv4Addr::new(192, 0, 2, 1)).unwrap();
        let mut none = named(INTERFACE);
        none.ifr_ifru.ifru_addr = socket_address(Ipv4Addr::UNSPECIFIED);
        // SAFETY: SIOCSIFADDR takes a pointer to an ifreq, which it reads.
        unsafe { call(&UdpSocket::bind(ANY_V4).unwrap(), libc::SIOCSIFADDR, &mut none) }.unwrap();
        set_host_route(INTERFACE, None, Some(Ipv4Addr::new(169, 254, 169, 254))).unwrap();
        assert!(!read("route").contains("FEA9FEA9"));
    });
}
