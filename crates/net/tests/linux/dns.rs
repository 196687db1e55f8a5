//! A name server of the host, and a guest that asks it.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use smoltcp::wire::{
    DnsFlags, DnsOpcode, DnsPacket, DnsQueryType, DnsQuestion, DnsRecord, DnsRecordData, DnsRepr,
};

use crate::world::{World, dns_address};

/// The gateway, as the guest knows it.
const GATEWAY: (&str, u16) = ("100.64.0.1", 53);

/// The names that the server knows, and the queries that it got.
#[derive(Clone, Default)]
pub(crate) struct NameServer(Arc<Mutex<Zone>>);

#[derive(Default)]
struct Zone {
    names: HashMap<String, (u32, Vec<IpAddr>)>,
    queries: Vec<String>,
    is_silent: bool,
}

impl NameServer {
    /// Starts it where the broker's second resolver is, for UDP and TCP.
    pub(crate) fn start(world: &World) -> Self {
        let server = Self::default();
        let (datagrams, streams) = (server.clone(), server.clone());
        world.host.run(move || {
            let socket = UdpSocket::bind(dns_address()).unwrap();
            let listener = TcpListener::bind(dns_address()).unwrap();
            thread::spawn(move || {
                let mut query = [0; 4096];
                while let Ok((len, from)) = socket.recv_from(&mut query) {
                    if let Some(answer) = datagrams.answer(&query[..len]) {
                        socket.send_to(&answer, from).unwrap();
                    }
                }
            });
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let mut stream = stream.unwrap();
                    while let Some(query) = read_message(&mut stream) {
                        write_message(&mut stream, &streams.answer(&query).unwrap());
                    }
                }
            });
        });
        server
    }

    /// Gives a name its addresses, which live for `ttl` seconds.
    pub(crate) fn set(&self, name: &str, ttl: u32, addresses: &[&str]) {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        self.0.lock().unwrap().names.insert(name.to_owned(), (ttl, addresses));
    }

    /// Whether it answers queries over UDP.
    pub(crate) fn set_silent(&self, is_silent: bool) {
        self.0.lock().unwrap().is_silent = is_silent;
    }

    /// How many queries it got for a name.
    pub(crate) fn queries(&self, name: &str) -> usize {
        self.0.lock().unwrap().queries.iter().filter(|query| *query == name).count()
    }

    fn answer(&self, query: &[u8]) -> Option<Vec<u8>> {
        let packet = DnsPacket::new_checked(query).unwrap();
        let (rest, question) = DnsQuestion::parse(packet.payload()).unwrap();
        let labels: Result<Vec<&[u8]>, _> = packet.parse_name(question.name).collect();
        let labels = labels.unwrap().into_iter().map(|label| str::from_utf8(label).unwrap());
        let name = labels.collect::<Vec<_>>().join(".").to_lowercase();
        let mut zone = self.0.lock().unwrap();
        zone.queries.push(name.clone());
        if zone.is_silent {
            return None;
        }
        let found = zone.names.get(&name);
        let is_asked = |address: &&IpAddr| match question.type_ {
            DnsQueryType::A => address.is_ipv4(),
            DnsQueryType::Aaaa => address.is_ipv6(),
            _ => false,
        };
        let addresses: Vec<&IpAddr> =
            found.iter().flat_map(|found| &found.1).filter(is_asked).collect();
        let mut answer = query[..query.len() - rest.len()].to_vec();
        let code = if found.is_some() { 0 } else { 3 };
        answer[2..4].copy_from_slice(&[0x81, 0x80 | code]);
        answer[6..12].fill(0);
        answer[7] = u8::try_from(addresses.len()).unwrap();
        for address in addresses {
            let octets = match address {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            answer.extend([0xc0, 12]);
            answer.extend(u16::from(question.type_).to_be_bytes());
            answer.extend([0, 1]);
            answer.extend(found.unwrap().0.to_be_bytes());
            answer.extend(u16::try_from(octets.len()).unwrap().to_be_bytes());
            answer.extend(octets);
        }
        Some(answer)
    }
}

/// A query.
pub(crate) fn query(name: &str, kind: DnsQueryType) -> Vec<u8> {
    let label = |label: &str| [&[u8::try_from(label.len()).unwrap()], label.as_bytes()].concat();
    let mut labels: Vec<u8> = name.split('.').flat_map(label).collect();
    labels.push(0);
    let repr = DnsRepr {
        transaction_id: 0x1234,
        opcode: DnsOpcode::Query,
        flags: DnsFlags::RECURSION_DESIRED,
        question: DnsQuestion { name: &labels, type_: kind },
    };
    let mut message = vec![0; repr.buffer_len()];
    repr.emit(&mut DnsPacket::new_unchecked(message.as_mut_slice()));
    message
}

/// Asks the gateway over UDP, as a guest; called in its namespace.
pub(crate) fn resolve(name: &str) -> Vec<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let ask = |kind| {
        let mut answer = [0; 4096];
        let len = (0..20).find_map(|_| {
            socket.send_to(&query(name, kind), GATEWAY).unwrap();
            socket.recv(&mut answer).ok()
        });
        addresses(&answer[..len.unwrap()])
    };
    [DnsQueryType::A, DnsQueryType::Aaaa].into_iter().flat_map(ask).collect()
}

/// The same over TCP, for IPv4 addresses.
pub(crate) fn resolve_over_tcp(name: &str) -> Vec<IpAddr> {
    let mut stream = TcpStream::connect(GATEWAY).unwrap();
    write_message(&mut stream, &query(name, DnsQueryType::A));
    addresses(&read_message(&mut stream).unwrap())
}

fn addresses(answer: &[u8]) -> Vec<IpAddr> {
    let packet = DnsPacket::new_checked(answer).unwrap();
    assert!(packet.transaction_id() == 0x1234 && packet.flags().contains(DnsFlags::RESPONSE));
    let (mut rest, _) = DnsQuestion::parse(packet.payload()).unwrap();
    let record = |_| {
        let (next, record) = DnsRecord::parse(rest).unwrap();
        rest = next;
        match record.data {
            DnsRecordData::A(address) => IpAddr::V4(address),
            DnsRecordData::Aaaa(address) => IpAddr::V6(address),
            other => panic!("{other:?}"),
        }
    };
    (0..packet.answer_record_count()).map(record).collect()
}

fn read_message(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut len = [0; 2];
    stream.read_exact(&mut len).ok()?;
    let mut message = vec![0; usize::from(u16::from_be_bytes(len))];
    stream.read_exact(&mut message).ok()?;
    Some(message)
}

fn write_message(stream: &mut TcpStream, message: &[u8]) {
    let len = u16::try_from(message.len()).unwrap().to_be_bytes();
    stream.write_all(&[&len, message].concat()).unwrap();
}
