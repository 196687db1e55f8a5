//! The network that a guest sees. It is the same for all clones of a snapshot.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use smoltcp::wire::{ETHERNET_HEADER_LEN, IPV4_HEADER_LEN, IPV6_HEADER_LEN};

/// The addresses and the MTU of a guest's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestNetwork {
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// The gateway's MAC address.
    pub gateway_mac: [u8; 6],
    /// IPv4.
    pub ipv4: Subnet<Ipv4Addr>,
    /// IPv6.
    pub ipv6: Subnet<Ipv6Addr>,
    /// The largest IP packet in bytes, from 1280 to 65,520.
    pub mtu: u16,
}

/// The addresses of one IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet<A> {
    /// The guest's address.
    pub address: A,
    /// Bits of the network's prefix.
    pub prefix: u8,
    /// The gateway, which is also the guest's DNS server.
    pub gateway: A,
}

impl Default for GuestNetwork {
    fn default() -> Self {
        Self {
            mac: [0x02, 0x66, 0x69, 0x72, 0x6e, 0x02],
            gateway_mac: [0x02, 0x66, 0x69, 0x72, 0x6e, 0x01],
            ipv4: Subnet {
                address: Ipv4Addr::new(100, 64, 0, 2),
                prefix: 30,
                gateway: Ipv4Addr::new(100, 64, 0, 1),
            },
            ipv6: Subnet {
                address: Ipv6Addr::new(0xfd00, 0x6669, 0x726e, 0, 0, 0, 0, 2),
                prefix: 64,
                gateway: Ipv6Addr::new(0xfd00, 0x6669, 0x726e, 0, 0, 0, 0, 1),
            },
            mtu: Self::DEFAULT_MTU,
        }
    }
}

impl GuestNetwork {
    /// The MTU of Ethernet.
    pub const DEFAULT_MTU: u16 = 1500;
    /// The smallest MTU, which IPv6 requires (RFC 8200, 5).
    pub const MIN_MTU: u16 = 1280;
    /// The largest MTU.
    pub const MAX_MTU: u16 = 65_520;

    /// Whether `address` is the guest's.
    pub(crate) fn is_guest(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => address == self.ipv4.address,
            IpAddr::V6(address) => address == self.ipv6.address,
        }
    }

    /// Whether `address` is the gateway's.
    pub(crate) fn is_gateway(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => address == self.ipv4.gateway,
            IpAddr::V6(address) => {
                address == self.ipv6.gateway || address == self.gateway_link_local()
            }
        }
    }

    /// The gateway's link-local address, from its MAC address (RFC 4291, appendix A). Router
    /// advertisements need one as their source.
    pub(crate) fn gateway_link_local(&self) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.gateway_mac;
        let group = |high, low| u16::from_be_bytes([high, low]);
        Ipv6Addr::new(0xfe80, 0, 0, 0, group(a ^ 2, b), group(c, 0xff), group(0xfe, d), group(e, f))
    }

    /// Bytes for TCP or UDP in a packet of this link.
    pub(crate) fn ip_payload(&self, address: IpAddr) -> usize {
        usize::from(self.mtu) - ip_header(address)
    }
}

/// Bytes of an IP header without options.
pub(crate) const fn ip_header(address: IpAddr) -> usize {
    if address.is_ipv4() { IPV4_HEADER_LEN } else { IPV6_HEADER_LEN }
}

/// Bytes of a frame before TCP, UDP or ICMP.
pub(crate) const fn link_headers(address: IpAddr) -> usize {
    ETHERNET_HEADER_LEN + ip_header(address)
}
