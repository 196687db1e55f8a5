use super::*;

fn parsed(text: &str) -> Network {
    match text.parse() {
        Ok(NetArg::Some(network)) => *network,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn every_option_is_read() {
    assert_eq!("none".parse::<NetArg>().unwrap(), NetArg::None);
    assert_eq!(parsed("tap:t0"), Network { tap: Some("t0".to_owned()), ..Network::default() });
    let found = parsed(
        "tap:t0,mac=02:00:00:0a:FF:07,mtu=9000,address=10.0.0.2/24,gateway=10.0.0.1,dns=fd00::1,\
         to-guest=10M,to-guest-frames=7,from-guest=1K,from-guest-frames=8",
    );
    let limit = |bytes, frames| RateLimit {
        bytes: Some(TokenBucket::per_second(bytes)),
        operations: Some(TokenBucket::per_second(frames)),
    };
    let expected = Network {
        tap: Some("t0".to_owned()),
        mac: Some([2, 0, 0, 10, 255, 7]),
        mtu: Some(9000),
        address: Some((Ipv4Addr::new(10, 0, 0, 2), 24)),
        gateway: Some(Ipv4Addr::new(10, 0, 0, 1)),
        dns: Some("fd00::1".parse().unwrap()),
        to_guest: limit(10 << 20, 7),
        from_guest: limit(1024, 8),
    };
    assert_eq!(found, expected);
}

#[test]
fn the_proxy_has_addresses_of_its_own() {
    assert_eq!(parsed("proxy"), Network::default());
    assert_eq!(parsed("proxy,mtu=65520").mtu, Some(65520));
}

#[test]
fn what_is_wrong_is_named() {
    let cases = [
        ("", "is not a network"),
        ("tun:t0", "is not a network"),
        ("tap:t0,speed=1", "is not an option"),
        ("tap:t0,mtu", "is not an option"),
        ("tap:t0,mtu=1500,mtu=1500", "mtu is given twice"),
        ("tap:t0,mtu=67", "is not an MTU"),
        ("tap:t0,mtu=70000", "is not an MTU"),
        ("tap:t0,mac=02:00:00:00:00", "is not a MAC"),
        ("tap:t0,mac=03:00:00:00:00:01", "is not a MAC"),
        ("tap:t0,mac=+2:00:00:00:00:01", "is not a MAC"),
        ("tap:t0,mac=00:00:00:00:00:00", "is not a MAC"),
        ("tap:t0,address=10.0.0.2", "is not an IPv4 address with"),
        ("tap:t0,address=10.0.0.2/33", "is not an IPv4 address with"),
        ("tap:t0,address=10.0.0.2/0", "is not an IPv4 address with"),
        ("tap:t0,gateway=10.0.0.1", "gateway needs address"),
        ("tap:t0,dns=10.0.0.1", "dns needs address"),
        ("tap:t0,address=10.0.0.2/24,gateway=10.0.1.1", "is not in the guest's network"),
        ("tap:t0,address=10.0.0.2/24,gateway=::1", "is not an address of IPv4"),
        ("tap:t0,address=10.0.0.2/24,dns=host", "is not an address of IPv4 or IPv6"),
        ("proxy:x", "is not a network"),
        ("proxy,address=10.0.0.2/24", "are fixed in the network proxy"),
        ("proxy,mtu=1000", "is not an MTU of the network proxy"),
        ("tap:t0,to-guest=0", "is not a rate"),
        ("tap:t0,to-guest=fast", "is not a rate"),
    ];
    for (text, reason) in cases {
        let error = text.parse::<NetArg>().unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
    // One network has all addresses of one machine.
    parsed("tap:t0,address=10.0.0.2/32,gateway=10.0.0.2");
}

#[test]
fn a_snapshot_has_its_device_already() {
    let mut descriptors = Descriptors::default();
    let mut error = |text: &str, egress: &[&str], has_disks| {
        let egress = egress.iter().map(|rule| (*rule).to_owned()).collect();
        let (net, publish, metadata) = (text.parse().unwrap(), Vec::new(), None);
        let arguments = NetArgs { net, egress, publish, metadata };
        arguments.reconnect(has_disks, &mut descriptors).unwrap_err().to_string()
    };
    assert!(
        error("tap:t0,mac=02:00:00:00:00:07", &[], true).starts_with("mac is chosen at the boot")
    );
    assert!(error("tap:t0,mtu=1500", &[], true).starts_with("mtu is chosen at the boot"));
    assert!(error("tap:t0", &[], false).contains("player"));
    let missing = error("tap:firn-missing", &[], true);
    assert!(missing.contains("no network interface firn-missing"), "{missing}");
    let rule = ["allow:10.0.0.0/8"];
    for net in ["none", "tap:t0"] {
        assert!(error(net, &rule, true).starts_with("--egress needs --net proxy"));
    }
    let wrong = error("proxy", &["10.0.0.0/8"], true);
    assert!(wrong.contains("begins with neither"), "{wrong}");
    let wrong = error("proxy", &["allow:api.example.com", "deny:b\u{fc}cher.example"], true);
    assert!(wrong.contains("\"deny:b\u{fc}cher.example\" has no valid host name"), "{wrong}");
}

#[test]
fn a_port_is_published_by_the_user_mode_network_alone() {
    // They have the listeners until a broker has them.
    let mut descriptors = Descriptors::default();
    let mut connect = |net: &str, ports: &[&str]| {
        let publish = ports.iter().map(|port| (*port).to_owned()).collect();
        let (net, egress, metadata) = (net.parse().unwrap(), Vec::new(), None);
        let arguments = NetArgs { net, egress, publish, metadata };
        arguments.connect(&mut descriptors).map_err(|error| error.to_string())
    };
    for net in ["none", "tap:t0"] {
        let error = connect(net, &["8080:80"]).unwrap_err();
        assert!(error.starts_with("--publish needs --net proxy"), "{error}");
    }
    let error = connect("proxy", &["80"]).unwrap_err();
    assert!(error.contains("is not a published port"), "{error}");
    let connected = connect("proxy", &["0:80"]).unwrap();
    let text = published(connected.ports.ports());
    assert!(
        text.starts_with("; 127.0.0.1:") && text.ends_with(" is port 80 of the guest"),
        "{text}"
    );
    let address = text["; ".len()..].split_once(' ').unwrap().0.to_owned();
    let port = address.rsplit_once(':').unwrap().1;
    let error = connect("proxy", &[&format!("{port}:81")]).unwrap_err();
    assert!(error.starts_with(&format!("cannot publish {address}: it is in use")), "{error}");
}

#[test]
fn metadata_needs_a_device_of_the_guest() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("m.json");
    std::fs::write(&file, "{}").unwrap();
    let metadata = Some(file.to_str().unwrap().parse().unwrap());
    let (egress, publish) = (Vec::new(), Vec::new());
    let arguments = NetArgs { net: NetArg::None, egress, publish, metadata };
    let mut descriptors = Descriptors::default();
    let error = arguments.connect(&mut descriptors).unwrap_err().to_string();
    assert!(error.starts_with("--metadata needs a network device"), "{error}");
    let error = arguments.reconnect(false, &mut descriptors).unwrap_err().to_string();
    assert!(error.contains("player"), "{error}");
    // A snapshot has its device, which is connected to its metadata alone.
    let spec = arguments.reconnect(true, &mut descriptors).unwrap().network.unwrap();
    assert!(spec.end.is_none() && spec.metadata.is_some());
    let arguments = NetArgs { net: "proxy".parse().unwrap(), ..arguments };
    let spec = arguments.connect(&mut descriptors).unwrap().network.unwrap();
    assert!(spec.end.is_some() && spec.metadata.is_some());
}
