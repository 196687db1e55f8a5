//! The addresses that are not globally reachable, or are not to be reached.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use smoltcp::wire::{IpCidr, Ipv4Cidr, Ipv6Cidr};

/// The rows of IANA's registries of special-purpose addresses (RFC 6890) with the column "Globally
/// Reachable", and multicast. The longest prefix that contains an address decides. "N/A" is not
/// reachable here: 6to4 and Teredo addresses lead to the IPv4 address inside.
///
/// <https://www.iana.org/assignments/iana-ipv4-special-registry>
///
/// 168.63.129.16 is in no registry: Azure serves its virtual machines there, with their credentials
/// among other things (WireServer). Other clouds have addresses of the registries for that.
pub(super) const IPV4: &[(Ipv4Addr, u8, bool)] = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8, false),
    (Ipv4Addr::new(10, 0, 0, 0), 8, false),
    (Ipv4Addr::new(100, 64, 0, 0), 10, false),
    (Ipv4Addr::new(127, 0, 0, 0), 8, false),
    (Ipv4Addr::new(168, 63, 129, 16), 32, false),
    (Ipv4Addr::new(169, 254, 0, 0), 16, false),
    (Ipv4Addr::new(172, 16, 0, 0), 12, false),
    (Ipv4Addr::new(192, 0, 0, 0), 24, false),
    (Ipv4Addr::new(192, 0, 0, 9), 32, true),
    (Ipv4Addr::new(192, 0, 0, 10), 32, true),
    (Ipv4Addr::new(192, 0, 2, 0), 24, false),
    (Ipv4Addr::new(192, 31, 196, 0), 24, true),
    (Ipv4Addr::new(192, 52, 193, 0), 24, true),
    (Ipv4Addr::new(192, 88, 99, 0), 24, false),
    (Ipv4Addr::new(192, 168, 0, 0), 16, false),
    (Ipv4Addr::new(192, 175, 48, 0), 24, true),
    (Ipv4Addr::new(198, 18, 0, 0), 15, false),
    (Ipv4Addr::new(198, 51, 100, 0), 24, false),
    (Ipv4Addr::new(203, 0, 113, 0), 24, false),
    (Ipv4Addr::new(224, 0, 0, 0), 4, false),
    (Ipv4Addr::new(240, 0, 0, 0), 4, false),
];

/// As [`IPV4`]. The first row denies what IANA has not allocated: only 2000::/3 is global unicast
/// (<https://www.iana.org/assignments/ipv6-address-space>).
///
/// <https://www.iana.org/assignments/iana-ipv6-special-registry>
pub(super) const IPV6: &[(Ipv6Addr, u8, bool)] = &[
    (Ipv6Addr::UNSPECIFIED, 0, false),
    (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3, true),
    (Ipv6Addr::LOCALHOST, 128, false),
    (Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96, false),
    (Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96, true),
    (Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0), 48, false),
    (Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 0), 64, false),
    (Ipv6Addr::new(0x100, 0, 0, 1, 0, 0, 0, 0), 64, false),
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23, false),
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 32, false),
    (Ipv6Addr::new(0x2001, 1, 0, 0, 0, 0, 0, 1), 128, true),
    (Ipv6Addr::new(0x2001, 1, 0, 0, 0, 0, 0, 2), 128, true),
    (Ipv6Addr::new(0x2001, 1, 0, 0, 0, 0, 0, 3), 128, true),
    (Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0), 48, false),
    (Ipv6Addr::new(0x2001, 3, 0, 0, 0, 0, 0, 0), 32, true),
    (Ipv6Addr::new(0x2001, 4, 0x112, 0, 0, 0, 0, 0), 48, true),
    (Ipv6Addr::new(0x2001, 0x10, 0, 0, 0, 0, 0, 0), 28, false),
    (Ipv6Addr::new(0x2001, 0x20, 0, 0, 0, 0, 0, 0), 28, true),
    (Ipv6Addr::new(0x2001, 0x30, 0, 0, 0, 0, 0, 0), 28, true),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32, false),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16, false),
    (Ipv6Addr::new(0x2620, 0x4f, 0x8000, 0, 0, 0, 0, 0), 48, true),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20, false),
    (Ipv6Addr::new(0x5f00, 0, 0, 0, 0, 0, 0, 0), 16, false),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7, false),
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10, false),
    (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8, false),
];

/// Whether IANA lists `address` as globally reachable, or no row lists it as special.
pub(super) fn is_global(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => longest_row(address, IPV4, |row| Ipv4Cidr::new(row.0, row.1).into()),
        IpAddr::V6(_) => longest_row(address, IPV6, |row| Ipv6Cidr::new(row.0, row.1).into()),
    }
}

/// The verdict of the longest row that contains `address`.
fn longest_row<A>(
    address: IpAddr,
    rows: &[(A, u8, bool)],
    cidr: impl Fn(&(A, u8, bool)) -> IpCidr,
) -> bool {
    let containing = rows.iter().filter(|row| cidr(row).contains_addr(&address.into()));
    containing.max_by_key(|row| row.1).is_none_or(|row| row.2)
}

/// The addresses that a packet to `address` may end at: itself, or the IPv4 address that it
/// contains, or both.
pub(super) fn destinations(address: IpAddr) -> (IpAddr, Option<IpAddr>) {
    let address = address.to_canonical();
    let IpAddr::V6(v6) = address else { return (address, None) };
    let embedded = match v6.segments() {
        // NAT64 (RFC 6052), with its well-known prefix and the local one in its usual form of 96
        // bits (RFC 8215).
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x64, 0xff9b, 1, _, _, _, high, low]
        // 6to4 (RFC 3056).
        | [0x2002, high, low, ..] => Some((high, low)),
        // Teredo (RFC 4380): the client's address is inverted.
        [0x2001, 0, .., high, low] => Some((!high, !low)),
        _ => None,
    };
    let embedded = embedded.map(|(high, low)| {
        let bits = u32::from(high) << 16 | u32::from(low);
        IpAddr::V4(Ipv4Addr::from_bits(bits))
    });
    (address, embedded)
}

#[cfg(test)]
#[path = "special_tests.rs"]
mod tests;
