use firn_required::{TapDevice as Made, in_own_network};

use super::*;

const NETWORK: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 200, 0, 0), 16);

fn make(names: &[&str]) -> Vec<Made> {
    let made = (1..)
        .zip(names)
        .map(|(host, name)| Made::create(name, Ipv4Addr::new(192, 0, host, 1)).unwrap());
    made.collect()
}

fn error(prefix: &str, network: (Ipv4Addr, u8)) -> String {
    TapDevices::find(prefix, network, None).unwrap_err().to_string()
}

#[test]
fn each_microvm_takes_a_device_and_gives_it_back() {
    in_own_network(|| {
        let _made = make(&["t2", "t10", "t", "t01", "tx3", "u1"]);
        let dns = Some(IpAddr::from([10, 0, 0, 53]));
        let taps = FunctionNetwork::Taps(Arc::new(TapDevices::find("t", NETWORK, dns).unwrap()));
        assert_eq!(taps.limit(), Some(2));
        let taken = || {
            let mut descriptors = Descriptors::default();
            let spec = taps.connect(&mut descriptors)?;
            Ok::<_, ConnectError>((spec.addresses.unwrap(), descriptors))
        };
        let (first, held) = taken().unwrap();
        let expected = NetworkAddresses {
            address: Ipv4Addr::new(10, 200, 0, 10),
            prefix: 30,
            gateway: Some(Ipv4Addr::new(10, 200, 0, 9)),
            dns,
            ipv6: None,
        };
        assert_eq!(first, expected);
        let (second, _also_held) = taken().unwrap();
        assert_eq!(second.address, Ipv4Addr::new(10, 200, 0, 42));
        for _ in 0..3 {
            let error = StartError::from(taken().unwrap_err()).to_string();
            assert!(
                error.starts_with("all 2 tap devices of --network tap:t are in use"),
                "{error}"
            );
        }
        // Whichever is its turn, the free one is found.
        drop(held);
        for _ in 0..3 {
            assert_eq!(taken().unwrap().0, first);
        }
    });
}

#[test]
fn devices_that_cannot_be_used_are_named() {
    in_own_network(|| {
        assert!(error("t", NETWORK).starts_with("there is no tap device t0, t1"));
        let _made = make(&["t0", "t4"]);
        let small = (Ipv4Addr::new(10, 200, 0, 0), 28);
        assert!(error("t", small).contains("10.200.0.0/28 has no addresses for the tap device t4"));
        assert!(error("t", (NETWORK.0, 31)).contains("for the tap device t0"));
        TapDevices::find("t", (NETWORK.0, 27), None).unwrap();
        let _held = open_tap("t4").unwrap();
        assert!(error("t", NETWORK).contains("the tap device t4 is in use"));
    });
}

#[test]
fn a_device_that_was_removed_is_passed_over() {
    in_own_network(|| {
        let mut made = make(&["t0", "t1"]);
        let taps = TapDevices::find("t", NETWORK, None).unwrap();
        drop(made.pop());
        for _ in 0..2 {
            let spec = taps.take(&mut Descriptors::default()).unwrap();
            assert_eq!(spec.addresses.unwrap().address, Ipv4Addr::new(10, 200, 0, 2));
        }
        drop(made);
        let error = taps.take(&mut Descriptors::default()).unwrap_err().to_string();
        assert!(error.contains("there is no network interface t"), "{error}");
    });
}
