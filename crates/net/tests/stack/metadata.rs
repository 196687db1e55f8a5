//! The metadata service with smoltcp as its guest.

use firn_net::{GuestNetwork, MetadataConfig, MetadataStore, MetadataVersion, Offloads, Proxy};
use serde_json::json;
use smoltcp::iface::SocketHandle;
use smoltcp::socket::tcp::State;

use crate::ALL;
use crate::guest::{Guest, Link};

/// The most connections of a service.
const MAX_CONNECTIONS: usize = 64;

/// A document whose longest string takes several segments.
pub(crate) fn store() -> MetadataStore {
    let store = MetadataStore::default();
    let long: String = ('a'..='z').cycle().take(50_000).collect();
    store.put(json!({"name": "Ada", "long": long})).unwrap();
    store
}

fn service(version: MetadataVersion, store: &MetadataStore) -> Proxy {
    let config = MetadataConfig { version, ..MetadataConfig::default() };
    let GuestNetwork { mac, mtu, .. } = GuestNetwork::default();
    Proxy::metadata(mac, mtu, config, store.clone()).unwrap()
}

fn guest(version: MetadataVersion, link: Link) -> Guest {
    Guest::with_metadata(link, service(version, &store()))
}

fn connect(guest: &mut Guest) -> SocketHandle {
    let socket = guest.connect(MetadataConfig::DEFAULT_ADDRESS, 80);
    guest.run(|guest| guest.tcp(socket).may_send());
    socket
}

/// The answer to a request.
fn ask(guest: &mut Guest, socket: SocketHandle, request: &str) -> String {
    guest.tcp(socket).send_slice(request.as_bytes()).unwrap();
    let mut answer = String::new();
    guest.run(|guest| {
        while guest.tcp(socket).can_recv() {
            let read = |bytes: &mut [u8]| (bytes.len(), String::from_utf8(bytes.to_vec()).unwrap());
            answer += &guest.tcp(socket).recv(read).unwrap();
        }
        let Some((head, content)) = answer.split_once("\r\n\r\n") else { return false };
        let len = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
        content.len() == len.parse::<usize>().unwrap()
    });
    answer
}

fn content(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}

#[test]
fn a_guest_reads_its_metadata() {
    for (offloads, lose_every) in [(ALL, 0), (Offloads::default(), 0), (Offloads::default(), 7)] {
        let mut guest = guest(MetadataVersion::V1, Link { offloads, lose_every });
        let socket = connect(&mut guest);
        for _ in 0..3 {
            let answer = ask(&mut guest, socket, "GET /name HTTP/1.1\r\n\r\n");
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
            assert_eq!(content(&answer), "Ada");
            let answer = ask(&mut guest, socket, "GET /long HTTP/1.1\r\n\r\n");
            assert_eq!(content(&answer), store().document()["long"]);
        }
        guest.tcp(socket).close();
        guest.run(|guest| guest.proxy.counters().flows == 0);
        assert_eq!(guest.proxy.counters().buffered, 0);
    }
}

#[test]
fn the_service_ends_a_connection_that_is_to_end() {
    let mut guest = guest(MetadataVersion::V1, Link::default());
    let socket = connect(&mut guest);
    let answer = ask(&mut guest, socket, "GET /name HTTP/1.0\r\n\r\n");
    assert_eq!(content(&answer), "Ada");
    guest.run(|guest| guest.tcp(socket).state() == State::CloseWait);
    guest.tcp(socket).close();
    guest.run(|guest| guest.proxy.counters().flows == 0);
}

#[test]
fn a_token_is_of_use_until_the_thaw() {
    let store = store();
    let link = Link::default();
    let mut guest = Guest::with_metadata(link, service(MetadataVersion::V2, &store));
    let socket = connect(&mut guest);
    let put = "PUT /latest/api/token HTTP/1.1\r\nX-aws-ec2-metadata-token-ttl-seconds: 60\r\n\r\n";
    let answer = ask(&mut guest, socket, put);
    assert!(answer.contains("\r\nX-aws-ec2-metadata-token-ttl-seconds: 60\r\n"), "{answer}");
    let token = content(&answer).to_owned();
    let get = format!("GET /name HTTP/1.1\r\nX-aws-ec2-metadata-token: {token}\r\n\r\n");
    assert_eq!(content(&ask(&mut guest, socket, &get)), "Ada");
    let answer = ask(&mut guest, socket, "GET /name HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 401 Unauthorized\r\n"), "{answer}");

    // A clone: its service is another one, and resets the connections of before.
    let state = guest.proxy.save();
    assert_eq!(state.connections(), 1);
    guest.proxy = service(MetadataVersion::V2, &store);
    guest.proxy.restore(&state);
    guest.run(|guest| guest.tcp(socket).state() == State::Closed);
    let socket = connect(&mut guest);
    let answer = ask(&mut guest, socket, &get);
    assert!(answer.starts_with("HTTP/1.1 401 Unauthorized\r\n"), "{answer}");
}

/// A guest whose programs forget their connections still reaches its metadata.
#[test]
fn the_connection_that_is_unused_for_longest_ends_for_a_new_one() {
    let mut guest = guest(MetadataVersion::V1, Link::default());
    guest.buffer = 4096;
    let get = "GET /name HTTP/1.1\r\n\r\n";
    let sockets: Vec<SocketHandle> = (0..MAX_CONNECTIONS).map(|_| connect(&mut guest)).collect();
    // The first one is used again.
    ask(&mut guest, sockets[0], get);
    let last = connect(&mut guest);
    assert_eq!(content(&ask(&mut guest, last, get)), "Ada");
    guest.run(|guest| guest.tcp(sockets[1]).state() == State::Closed);
    assert_eq!(content(&ask(&mut guest, sockets[0], get)), "Ada");
    let counters = guest.proxy.counters();
    assert_eq!(counters.flows, u64::try_from(MAX_CONNECTIONS).unwrap());
}

#[test]
fn other_ports_are_closed() {
    let mut guest = guest(MetadataVersion::V1, Link::default());
    for port in [53, 443] {
        let socket = guest.connect(MetadataConfig::DEFAULT_ADDRESS, port);
        guest.run(|guest| guest.tcp(socket).state() == State::Closed);
    }
    let (config, store) = (MetadataConfig::default(), MetadataStore::default());
    assert!(Proxy::metadata([2; 6], 67, config, store).is_err());
}
