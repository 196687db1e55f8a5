use super::*;

#[test]
fn every_network_is_read() {
    let parsed = |text: &str| text.parse::<ServeNetworkArg>().unwrap();
    assert_eq!(parsed("none"), ServeNetworkArg::None);
    assert_eq!(parsed("proxy"), ServeNetworkArg::Proxy);
    let network = (Ipv4Addr::new(10, 200, 0, 0), 16);
    let expected = ServeNetworkArg::Taps { prefix: "firn-".to_owned(), network, dns: None };
    assert_eq!(parsed("tap:firn-,network=10.200.0.0/16"), expected);
    let dns = Some("10.0.0.53".parse().unwrap());
    let expected = ServeNetworkArg::Taps { prefix: "t".to_owned(), network, dns };
    assert_eq!(parsed("tap:t,dns=10.0.0.53,network=10.200.0.0/16"), expected);
}

#[test]
fn what_is_wrong_is_named() {
    let cases = [
        ("", "is not a network of functions"),
        ("bridge", "is not a network of functions"),
        ("tap", "is not a network of functions"),
        ("proxy,mtu=1500", "is not a network of functions"),
        ("tap:", "\"\" is not the beginning"),
        ("tap:tap0", "\"tap0\" is not the beginning"),
        ("tap:a/b", "is not the beginning"),
        ("tap:fifteen-letters", "is not the beginning"),
        ("tap:t", "need a network"),
        ("tap:t,dns=10.0.0.1", "need a network"),
        ("tap:t,mtu=1500", "\"mtu=1500\" is not an option"),
        ("tap:t,network", "\"network\" is not an option"),
        ("tap:t,network=10.200.0.0", "is not a network for tap devices"),
        ("tap:t,network=10.200.0.1/16", "is not a network for tap devices"),
        ("tap:t,network=10.200.0.0/31", "is not a network for tap devices"),
        ("tap:t,network=10.200.0.0/16,dns=x", "\"x\" is not the IP address"),
        ("tap:t,network=10.0.0.0/8,network=10.0.0.0/8", "network is given twice"),
    ];
    for (text, reason) in cases {
        let error = text.parse::<ServeNetworkArg>().unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn rules_are_for_sockets_of_this_host() {
    let policy = || Policy::parse(["deny:10.0.0.0/8"]).unwrap();
    let network = ServeNetworkArg::Proxy.open(policy(), true).unwrap();
    assert!(matches!(network, Some(FunctionNetwork::Proxy(_))));
    assert!(ServeNetworkArg::None.open(policy(), false).unwrap().is_none());
    let taps: ServeNetworkArg = "tap:firn-none,network=10.200.0.0/16".parse().unwrap();
    for argument in [ServeNetworkArg::None, taps.clone()] {
        let error = argument.open(policy(), true).unwrap_err().to_string();
        assert!(error.contains("--egress needs --network proxy"), "{error}");
    }
    let error = taps.open(policy(), false).unwrap_err().to_string();
    assert!(error.contains("there is no tap device firn-none0"), "{error}");
}
