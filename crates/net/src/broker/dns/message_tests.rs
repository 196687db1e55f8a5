use std::time::Duration;

use proptest::prelude::*;
use smoltcp::wire::{DnsQueryType, DnsRcode};

use super::super::testing::query as guest_query;
use super::super::testing::{ANSWER, Data, address, alias, answer, header, name, question};
use super::{
    Address, Answer, MAX_CHAIN, MAX_RECORDS, Refused, Unusable, error_answer, id, parse_answer,
    parse_query, query, set_id,
};

const A: DnsQueryType = DnsQueryType::A;
const AAAA: DnsQueryType = DnsQueryType::Aaaa;

fn addresses(answer: &Answer) -> Vec<(String, u64)> {
    let addresses = answer.addresses.iter();
    addresses.map(|address| (address.ip.to_string(), address.ttl.as_secs())).collect()
}

#[test]
fn a_query_is_read_and_others_are_refused() {
    let found = parse_query(&guest_query(7, "Api.Example.com", AAAA)).unwrap();
    assert_eq!(found, question("api.example.com", AAAA));
    // The broker's own one, with an OPT record.
    let own = query(&question("api.example.com", A));
    assert_eq!(parse_query(&own).unwrap(), question("api.example.com", A));
    assert_eq!(own[10..12], [0, 1]);

    let refused = |message: &[u8]| match parse_query(message).unwrap_err() {
        Refused::NoQuery => None,
        Refused::Answered(answer) => Some(answer[3] & 0xf),
    };
    let asked = question("a.b", A);
    for (message, code) in [
        (Vec::new(), None),
        (vec![0; 11], None),
        // An answer.
        (answer(1, ANSWER, &asked, &[]), None),
        // A dynamic update (RFC 2136).
        (answer(1, 5 << 11, &asked, &[]), Some(4)),
        (header(1, 0, [0; 4]), Some(1)),
        (header(1, 0, [1, 0, 0, 0]), Some(1)),
        (header(1, 0, [2, 0, 0, 0]), Some(1)),
        (answer(1, 0, &asked, &[address("a.b", 1, "1.1.1.1")]), Some(1)),
        // Class CHAOS.
        ([header(1, 0, [1, 0, 0, 0]), b"\x01a\0\0\x01\0\x03".to_vec()].concat(), Some(1)),
        // A name that is elsewhere in the message.
        ([header(1, 0, [1, 0, 0, 0]), b"\xc0\x04\0\x01\0\x01".to_vec()].concat(), Some(1)),
        ([header(1, 0, [1, 0, 0, 0]), b"\x01a\xc0\x0c\0\x01\0\x01".to_vec()].concat(), Some(1)),
    ] {
        assert_eq!(refused(&message), code, "{message:?}");
    }
}

#[test]
fn an_error_has_the_id_and_the_question() {
    let message = guest_query(0x1234, "a.b", A);
    let error = error_answer(&message, DnsRcode::ServFail);
    assert_eq!(error[..12], [0x12, 0x34, 0x81, 0x82, 0, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(error[12..], message[12..]);
    assert!(!parse_answer(&error, 0x1234, &question("a.b", A)).unwrap().is_conclusive);
    let error = error_answer(&header(9, 0x2900, [3, 0, 0, 0]), DnsRcode::NotImp);
    assert_eq!(error, [0, 9, 0xa9, 0x84, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn ids_are_replaced() {
    let mut message = vec![1, 2, 3];
    set_id(&mut message, 0xabcd);
    assert_eq!((id(&message), message[2]), (0xabcd, 3));
    set_id(&mut [0], 1);
    assert_eq!(id(&[0]), 0);
}

#[test]
fn only_the_answer_to_the_query_is_used() {
    let asked = question("api.example.com", A);
    let records = [address("api.example.com", 30, "1.2.3.4")];
    let found = parse_answer(&answer(7, ANSWER, &asked, &records), 7, &asked).unwrap();
    assert_eq!(addresses(&found), [("1.2.3.4".to_owned(), 30)]);
    assert_eq!(found.names, [name("api.example.com")]);
    assert!(found.is_conclusive && !found.is_truncated);
    for foreign in [
        Vec::new(),
        header(7, ANSWER, [0; 4]),
        header(7, ANSWER, [1, 0, 0, 0]),
        answer(8, ANSWER, &asked, &records),
        answer(7, 0x0100, &asked, &records),
        answer(7, ANSWER | 4 << 11, &asked, &records),
        answer(7, ANSWER, &question("api.example.com", AAAA), &records),
        answer(7, ANSWER, &question("evil.example.com", A), &records),
    ] {
        assert_eq!(parse_answer(&foreign, 7, &asked), Err(Unusable::Foreign), "{foreign:?}");
    }
}

#[test]
fn aliases_are_followed_and_other_names_are_not() {
    let asked = question("api.example.com", A);
    let records = [
        address("edge.cdn.net", 90, "1.1.1.1"),
        alias("api.example.com", 60, "lb.example.com"),
        // In any order and case, with the shortest life.
        address("EDGE.cdn.net", 5, "1.1.1.2"),
        alias("LB.example.com", 20, "edge.cdn.net"),
        address("other.example.com", 60, "6.6.6.6"),
        ("edge.cdn.net", 60, Data::Other(16, b"text".to_vec())),
        address("edge.cdn.net", 60, "2606:4700::1"),
    ];
    let found = parse_answer(&answer(1, ANSWER, &asked, &records), 1, &asked).unwrap();
    let expected = [("1.1.1.1", 20), ("1.1.1.2", 5), ("2606:4700::1", 20)];
    assert_eq!(addresses(&found), expected.map(|(ip, ttl)| (ip.to_owned(), ttl)));
    assert_eq!(found.names, ["api.example.com", "lb.example.com", "edge.cdn.net"].map(name));
}

#[test]
fn records_after_the_answers_are_not_used() {
    let asked = question("a.b", A);
    let mut message = answer(1, ANSWER, &asked, &[address("a.b", 1, "1.1.1.1")]);
    // The same record as an additional one.
    message[7] = 0;
    message[11] = 1;
    assert_eq!(parse_answer(&message, 1, &asked).unwrap().addresses, []);
}

#[test]
fn an_answer_that_is_cut_has_no_addresses() {
    let asked = question("a.b", A);
    let mut message = answer(1, ANSWER | 0x200, &asked, &[address("a.b", 1, "1.1.1.1")]);
    message.truncate(message.len() - 2);
    let found = parse_answer(&message, 1, &asked).unwrap();
    assert!(found.is_truncated && found.addresses.is_empty());
}

#[test]
fn hostile_answers_are_malformed() {
    let asked = question("a.b", A);
    let malformed = |message: &[u8]| {
        assert_eq!(parse_answer(message, 1, &asked), Err(Unusable::Malformed), "{message:?}");
    };
    let answer = |records: &[_]| answer(1, ANSWER, &asked, records);
    // A circle of aliases, and a chain that is too long.
    malformed(&answer(&[alias("a.b", 1, "a.b")]));
    malformed(&answer(&[alias("a.b", 1, "c.d"), alias("c.d", 1, "a.b")]));
    let names: Vec<&'static str> =
        (0..=MAX_CHAIN).map(|number| &*format!("n{number}.b").leak()).collect();
    let chain = |len: usize| {
        let first = alias("a.b", 1, names[0]);
        let links = names.windows(2).take(len).map(|pair| alias(pair[0], 1, pair[1]));
        answer(&[first].into_iter().chain(links).collect::<Vec<_>>())
    };
    assert!(parse_answer(&chain(MAX_CHAIN - 2), 1, &asked).is_ok());
    malformed(&chain(MAX_CHAIN - 1));
    // Records without end, of another class, and of wrong lengths.
    malformed(&answer(&vec![address("a.b", 1, "1.1.1.1"); MAX_RECORDS + 1]));
    malformed(&answer(&[("a.b", 1, Data::Other(1, vec![1, 2, 3]))]));
    malformed(&answer(&[("a.b", 1, Data::Other(28, vec![0; 4]))]));
    malformed(&answer(&[("a.b", 1, Data::Other(5, b"\xc0\xff".to_vec()))]));
    let whole = answer(&[address("a.b", 1, "1.1.1.1")]);
    (30..whole.len()).for_each(|len| malformed(&whole[..len.min(whole.len() - 1)]));
    // A pointer to itself.
    let mut message = whole.clone();
    let record = answer(&[]).len();
    message.splice(record..record + 5, [0xc0, u8::try_from(record).unwrap()]);
    malformed(&message);
}

#[test]
fn a_negative_life_is_none() {
    let asked = question("a.b", A);
    let message = answer(1, ANSWER, &asked, &[address("a.b", 1 << 31, "1.1.1.1")]);
    let expected = Address { ip: "1.1.1.1".parse().unwrap(), ttl: Duration::ZERO };
    assert_eq!(parse_answer(&message, 1, &asked).unwrap().addresses, [expected]);
}

/// Whether the bytes of an address stand in a message.
fn contains(message: &[u8], ip: std::net::IpAddr) -> bool {
    let octets = match ip {
        std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
        std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    message.windows(octets.len()).any(|bytes| bytes == octets)
}

proptest! {
    #[test]
    fn any_bytes_are_handled(message in prop::collection::vec(any::<u8>(), 0..600)) {
        let asked = question("a.b", A);
        let _ = parse_query(&message);
        if message.len() >= 12 {
            let error = error_answer(&message, DnsRcode::ServFail);
            prop_assert!(error.len() <= message.len());
        }
        let _ = parse_answer(&message, id(&message), &asked);
    }

    /// An answer with some bytes changed is refused, or has addresses that stand in it, and names
    /// that are at most a chain.
    #[test]
    fn a_damaged_answer_has_only_its_own_addresses(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        cut in any::<prop::sample::Index>(),
        has_cut in any::<bool>(),
    ) {
        let asked = question("api.example.com", A);
        let records = [
            alias("api.example.com", 60, "lb.example.com"),
            address("lb.example.com", 5, "1.1.1.2"),
            address("lb.example.com", 5, "2606:4700::1"),
            alias("other.example.com", 60, "lb.example.com"),
        ];
        let mut message = answer(1, ANSWER, &asked, &records);
        for (index, byte) in changes {
            let at = index.index(message.len());
            message[at] = byte;
        }
        if has_cut {
            message.truncate(cut.index(message.len()));
        }
        let _ = parse_query(&message);
        if let Ok(answer) = parse_answer(&message, 1, &asked) {
            prop_assert!(answer.names.len() <= MAX_CHAIN);
            prop_assert_eq!(&answer.names[0], &asked.name);
            for address in &answer.addresses {
                prop_assert!(contains(&message, address.ip), "{:?}", address);
            }
        }
    }

    /// What the broker forwards is the question that it has read.
    #[test]
    fn a_question_is_the_same_when_it_is_written(
        labels in prop::collection::vec("[a-z0-9_-]{1,63}", 1..4),
        kind in any::<u16>(),
    ) {
        let asked = question(&labels.join("."), kind.into());
        prop_assert_eq!(parse_query(&query(&asked)).unwrap(), asked);
    }
}
