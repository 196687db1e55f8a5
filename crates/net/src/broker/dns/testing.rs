//! DNS messages for tests.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use smoltcp::wire::DnsQueryType;

use super::message::{Address, Answer, Question};
use super::name::Name;
use super::pins::Pins;

/// Data of a record.
#[derive(Clone, Debug)]
pub(super) enum Data {
    Address(IpAddr),
    Alias(&'static str),
    /// Of another type, or with a length that its type does not have.
    Other(u16, Vec<u8>),
}

/// A name, its life in seconds, and its data.
pub(super) type Record = (&'static str, u32, Data);

pub(super) fn name(text: &str) -> Name {
    Name::of_labels(text.split('.').map(|label| Ok::<_, Infallible>(label.as_bytes()))).unwrap()
}

pub(super) fn question(text: &str, kind: DnsQueryType) -> Question {
    Question { name: name(text), kind }
}

pub(super) fn address(owner: &'static str, ttl: u32, ip: &str) -> Record {
    (owner, ttl, Data::Address(ip.parse().unwrap()))
}

pub(super) fn alias(owner: &'static str, ttl: u32, target: &'static str) -> Record {
    (owner, ttl, Data::Alias(target))
}

/// A message with these flags and counts, before its sections.
pub(super) fn header(id: u16, flags: u16, counts: [u16; 4]) -> Vec<u8> {
    [id, flags].into_iter().chain(counts).flat_map(u16::to_be_bytes).collect()
}

/// An answer without an error.
pub(super) const ANSWER: u16 = 0x8180;

/// An answer with these flags to a question.
pub(super) fn answer(id: u16, flags: u16, question: &Question, records: &[Record]) -> Vec<u8> {
    let count = u16::try_from(records.len()).unwrap();
    let mut message = header(id, flags, [1, count, 0, 0]);
    message.extend(question.name.as_bytes());
    message.extend(u16::from(question.kind).to_be_bytes());
    message.extend([0, 1]);
    for (owner, ttl, data) in records {
        let (kind, data) = match data {
            Data::Address(IpAddr::V4(ip)) => (1, ip.octets().to_vec()),
            Data::Address(IpAddr::V6(ip)) => (28, ip.octets().to_vec()),
            Data::Alias(target) => (5, name(target).as_bytes().to_vec()),
            Data::Other(kind, data) => (*kind, data.clone()),
        };
        message.extend(name(owner).as_bytes());
        message.extend(kind.to_be_bytes());
        message.extend([0, 1]);
        message.extend(ttl.to_be_bytes());
        message.extend(u16::try_from(data.len()).unwrap().to_be_bytes());
        message.extend(data);
    }
    message
}

/// A query of a guest.
pub(super) fn query(id: u16, text: &str, kind: DnsQueryType) -> Vec<u8> {
    answer(id, 0x0100, &question(text, kind), &[])
}

/// A resolver without answers of its own.
pub(super) fn resolver() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// Pins addresses, as an answer for the name would.
pub(in crate::broker) fn pin(pins: &mut Pins, text: &str, addresses: &[&str]) {
    let ttl = Duration::from_secs(60);
    let addresses = addresses.iter().map(|ip| Address { ip: ip.parse().unwrap(), ttl }).collect();
    let names = vec![name(text)];
    let answer = Answer { names, addresses, is_truncated: false, is_conclusive: true };
    pins.pin(&answer, Instant::now()).unwrap();
}

/// The broker has resolved a name.
pub(in crate::broker) fn set_resolved(pins: &mut Pins, exact: usize) {
    pins.set_resolved(exact, Some(Duration::from_secs(60)), Instant::now());
}
