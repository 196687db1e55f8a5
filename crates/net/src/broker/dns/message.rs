//! DNS messages (RFC 1035). Both a query of the guest and an answer of a resolver may be hostile.

use std::net::IpAddr;
use std::time::Duration;

use smoltcp::wire::{
    DnsFlags, DnsOpcode, DnsPacket, DnsQueryType, DnsQuestion, DnsRcode, DnsRecord, DnsRecordData,
    DnsRepr,
};

use super::name::Name;

/// Bytes of a message's header.
const HEADER: usize = 12;
/// Records of an answer.
const MAX_RECORDS: usize = 256;
/// Names of a chain of aliases.
const MAX_CHAIN: usize = 16;
/// An OPT record (RFC 6891): answers of up to 1232 bytes over UDP, which no link has to fragment.
const OPT: [u8; 11] = [0, 0, 41, 0x04, 0xd0, 0, 0, 0, 0, 0, 0];
/// Where the header has the number of additional records.
const ADDITIONAL_COUNT: std::ops::Range<usize> = 10..12;

/// What a query is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) name: Name,
    pub(super) kind: DnsQueryType,
}

/// Why a query is not forwarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// It is not a query.
    NoQuery,
    /// Its error is this answer.
    Answered(Vec<u8>),
}

/// The answer to a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// The name of the question, and the names that it is an alias of, in their order.
    pub(super) names: Vec<Name>,
    pub(super) addresses: Vec<Address>,
    /// It was cut to fit in a datagram, and has no addresses here.
    pub(super) is_truncated: bool,
    /// The resolver has found addresses, or that there are none.
    pub(super) is_conclusive: bool,
}

/// An address of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) ip: IpAddr,
    /// The shortest of the records that lead to it.
    pub(super) ttl: Duration,
}

/// Why a message is not used as an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It is not the answer to this query; that one may follow.
    Foreign,
    /// It is, and is not valid.
    Malformed,
}

/// The question of a query that may be forwarded.
pub(super) fn parse_query(message: &[u8]) -> Result<Question, Refused> {
    let Ok(packet) = DnsPacket::new_checked(message) else { return Err(Refused::NoQuery) };
    if packet.flags().contains(DnsFlags::RESPONSE) {
        return Err(Refused::NoQuery);
    }
    let refused = |code| Refused::Answered(error_answer(message, code));
    if packet.opcode() != DnsOpcode::Query {
        return Err(refused(DnsRcode::NotImp));
    }
    if packet.question_count() != 1 || packet.answer_record_count() != 0 {
        return Err(refused(DnsRcode::FormErr));
    }
    let (name, question) = parse_question(&packet).ok_or_else(|| refused(DnsRcode::FormErr))?;
    // A compressed name would be read from other parts of the message.
    if name.as_bytes().len() != question.name.len() {
        return Err(refused(DnsRcode::FormErr));
    }
    Ok(Question { name, kind: question.type_ })
}

/// A query of the broker itself, with the id 0.
pub(super) fn query(question: &Question) -> Vec<u8> {
    let repr = DnsRepr {
        transaction_id: 0,
        opcode: DnsOpcode::Query,
        flags: DnsFlags::RECURSION_DESIRED,
        question: DnsQuestion { name: question.name.as_bytes(), type_: question.kind },
    };
    let mut message = vec![0; repr.buffer_len()];
    repr.emit(&mut DnsPacket::new_unchecked(message.as_mut_slice()));
    message[ADDITIONAL_COUNT].copy_from_slice(&1_u16.to_be_bytes());
    message.extend(OPT);
    message
}

/// The id of a message; 0 without one.
pub(super) fn id(message: &[u8]) -> u16 {
    message.first_chunk().map_or(0, |id| u16::from_be_bytes(*id))
}

/// Replaces the id of a message.
pub(super) fn set_id(message: &mut [u8], id: u16) {
    if let Some(first) = message.first_chunk_mut() {
        *first = id.to_be_bytes();
    }
}

/// An answer to `query` with an error and, where it is valid, the question.
pub(super) fn error_answer(query: &[u8], code: DnsRcode) -> Vec<u8> {
    let packet = DnsPacket::new_unchecked(query);
    let question = (packet.question_count() == 1)
        .then(|| DnsQuestion::parse(packet.payload()).ok())
        .flatten()
        .map(|(rest, _)| &query[..query.len() - rest.len()]);
    let mut answer = question.unwrap_or(&query[..HEADER]).to_vec();
    // The opcode and "recursion desired" are the query's.
    answer[2] = answer[2] & 0x79 | 0x80;
    answer[3] = 0x80 | u8::from(code) & 0xf;
    answer[4..HEADER].fill(0);
    answer[5] = u8::from(question.is_some());
    answer
}

/// Reads the answer to the query with `id` and `question`.
pub(super) fn parse_answer(
    message: &[u8],
    id: u16,
    question: &Question,
) -> Result<Answer, Unusable> {
    let packet = DnsPacket::new_checked(message).map_err(|_| Unusable::Foreign)?;
    let is_answer = packet.flags().contains(DnsFlags::RESPONSE)
        && packet.opcode() == DnsOpcode::Query
        && packet.transaction_id() == id
        && packet.question_count() == 1;
    let asked = parse_question(&packet).filter(|_| is_answer);
    let asked = asked.map(|(name, parsed)| Question { name, kind: parsed.type_ });
    if asked.as_ref() != Some(question) {
        return Err(Unusable::Foreign);
    }
    let is_truncated = packet.flags().contains(DnsFlags::TRUNCATED);
    let (rest, _) = DnsQuestion::parse(packet.payload()).map_err(|_| Unusable::Malformed)?;
    let records = if is_truncated { Vec::new() } else { parse_records(&packet, rest)? };
    let (names, addresses) = follow(&question.name, &records)?;
    let is_conclusive = matches!(packet.rcode(), DnsRcode::NoError | DnsRcode::NXDomain);
    Ok(Answer { names, addresses, is_truncated, is_conclusive })
}

/// A record of an answer.
struct Record {
    owner: Name,
    ttl: u32,
    data: Data,
}

enum Data {
    Address(IpAddr),
    Alias(Name),
}

fn parse_question<'a>(packet: &'a DnsPacket<&'a [u8]>) -> Option<(Name, DnsQuestion<'a>)> {
    let (_, question) = DnsQuestion::parse(packet.payload()).ok()?;
    Some((Name::of_labels(packet.parse_name(question.name))?, question))
}

/// The records with addresses and aliases. Those of the other sections are not used.
fn parse_records(packet: &DnsPacket<&[u8]>, mut rest: &[u8]) -> Result<Vec<Record>, Unusable> {
    let count = usize::from(packet.answer_record_count());
    if count > MAX_RECORDS {
        return Err(Unusable::Malformed);
    }
    let name = |bytes| Name::of_labels(packet.parse_name(bytes)).ok_or(Unusable::Malformed);
    let mut records = Vec::with_capacity(count);
    for _ in 0..count {
        let (next, record) = DnsRecord::parse(rest).map_err(|_| Unusable::Malformed)?;
        rest = next;
        let data = match record.data {
            DnsRecordData::A(address) => Data::Address(address.into()),
            DnsRecordData::Aaaa(address) => Data::Address(address.into()),
            DnsRecordData::Cname(target) => Data::Alias(name(target)?),
            DnsRecordData::Other(..) => continue,
        };
        // RFC 2181, 8: a negative number is 0.
        let ttl = i32::try_from(record.ttl).map_or(0, i32::unsigned_abs);
        records.push(Record { owner: name(record.name)?, ttl, data });
    }
    Ok(records)
}

/// Follows aliases from `name`, to the addresses of the last one.
fn follow(name: &Name, records: &[Record]) -> Result<(Vec<Name>, Vec<Address>), Unusable> {
    let (mut names, mut current, mut least) = (Vec::new(), name, u32::MAX);
    // Aliases may form a circle.
    while names.len() < MAX_CHAIN {
        names.push(current.clone());
        let of_current = || records.iter().filter(|record| record.owner == *current);
        let alias = of_current().find_map(|record| match &record.data {
            Data::Alias(target) => Some((target, record.ttl)),
            Data::Address(_) => None,
        });
        if let Some((target, ttl)) = alias {
            least = least.min(ttl);
            current = target;
            continue;
        }
        let address = |record: &Record| match record.data {
            Data::Address(ip) => {
                Some(Address { ip, ttl: Duration::from_secs(record.ttl.min(least).into()) })
            }
            Data::Alias(_) => None,
        };
        let addresses = of_current().filter_map(address).collect();
        return Ok((names, addresses));
    }
    Err(Unusable::Malformed)
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
