use std::net::IpAddr;

use super::{IPV4, IPV6, destinations, is_global};

/// The first and the last address of a row, and those beside it.
fn edges(address: u128, prefix: u8, bits: u32) -> [Option<u128>; 4] {
    let size = 1_u128.checked_shl(bits - u32::from(prefix));
    let last = size.map_or(u128::MAX, |size| address + (size - 1));
    let most = if bits == 32 { u128::from(u32::MAX) } else { u128::MAX };
    [
        Some(address),
        Some(last),
        address.checked_sub(1),
        last.checked_add(1).filter(|next| *next <= most),
    ]
}

/// The verdict of the longest row, computed in another way.
fn expected(address: u128, rows: &[(u128, u8, bool)], bits: u32) -> bool {
    let shift = |prefix: u8| bits - u32::from(prefix);
    let within =
        |row: &&(u128, u8, bool)| (address ^ row.0).checked_shr(shift(row.1)).unwrap_or(0) == 0;
    let mut rows: Vec<_> = rows.iter().filter(within).collect();
    rows.sort_by_key(|row| row.1);
    rows.last().is_none_or(|row| row.2)
}

#[test]
fn each_row_decides_from_its_first_address_to_its_last() {
    let rows: Vec<_> = IPV4.iter().map(|row| (row.0.to_bits().into(), row.1, row.2)).collect();
    for (address, prefix, _) in &rows {
        for edge in edges(*address, *prefix, 32).into_iter().flatten() {
            let ip = std::net::Ipv4Addr::from_bits(u32::try_from(edge).unwrap());
            assert_eq!(is_global(IpAddr::V4(ip)), expected(edge, &rows, 32), "{ip}");
        }
    }
    let rows: Vec<_> = IPV6.iter().map(|row| (row.0.to_bits(), row.1, row.2)).collect();
    for (address, prefix, _) in &rows {
        for edge in edges(*address, *prefix, 128).into_iter().flatten() {
            let ip = std::net::Ipv6Addr::from_bits(edge);
            assert_eq!(is_global(IpAddr::V6(ip)), expected(edge, &rows, 128), "{ip}");
        }
    }
}

/// One address of each entry of the registries, as they list it.
#[test]
fn the_registries_are_followed() {
    let not_reachable = [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.0.8",
        "192.0.0.170",
        "192.0.0.171",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.19.255.255",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:0:1",
        "::8.8.8.8",
        "64:ff9b:1::1",
        "100::1",
        "100:0:0:1::1",
        "2001::1",
        "2001:1::4",
        "2001:2::1",
        "2001:10::1",
        "2001:1ff::1",
        "2001:db8::1",
        "2002::1",
        "3fff::1",
        "4000::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
    ];
    let reachable = [
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.0.0.9",
        "192.0.0.10",
        "192.0.1.0",
        "192.31.196.1",
        "192.52.193.1",
        "192.175.48.1",
        "198.17.255.255",
        "198.20.0.0",
        "223.255.255.255",
        "64:ff9b::808:808",
        "2001:1::1",
        "2001:1::2",
        "2001:1::3",
        "2001:3::1",
        "2001:4:112::1",
        "2001:20::1",
        "2001:30::1",
        "2001:200::1",
        "2606:4700::1111",
        "2620:4f:8000::1",
        "2a00::1",
        "3ffe::1",
    ];
    for (addresses, expected) in [(&not_reachable[..], false), (&reachable[..], true)] {
        for address in addresses {
            assert_eq!(is_global(address.parse().unwrap()), expected, "{address}");
        }
    }
}

/// Where clouds serve their virtual machines.
#[test]
fn metadata_services_are_not_reachable() {
    for address in [
        "169.254.169.254",
        "fd00:ec2::254",
        "fd20:ce::254",
        "169.254.170.2",
        "100.100.100.200",
        "192.0.0.192",
        "168.63.129.16",
    ] {
        assert!(!is_global(address.parse().unwrap()), "{address}");
    }
    for beside in ["168.63.129.15", "168.63.129.17"] {
        assert!(is_global(beside.parse().unwrap()), "{beside}");
    }
}

#[test]
fn an_ipv4_address_inside_is_a_destination() {
    let cases = [
        ("10.0.0.1", "10.0.0.1", None),
        ("::ffff:10.0.0.1", "10.0.0.1", None),
        ("64:ff9b::a00:1", "64:ff9b::a00:1", Some("10.0.0.1")),
        ("64:ff9b:1:2::a00:1", "64:ff9b:1:2::a00:1", Some("10.0.0.1")),
        ("2002:a00:1::5", "2002:a00:1::5", Some("10.0.0.1")),
        ("2001:0:1:2:3:4:f5ff:fffe", "2001:0:1:2:3:4:f5ff:fffe", Some("10.0.0.1")),
        ("2606:4700::1111", "2606:4700::1111", None),
    ];
    for (address, itself, inside) in cases {
        let expected = (itself.parse().unwrap(), inside.map(|inside| inside.parse().unwrap()));
        assert_eq!(destinations(address.parse().unwrap()), expected, "{address}");
    }
}
