use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::metadata::{MetadataConfig, MetadataStore};

fn connection() -> Connection {
    let store = MetadataStore::default();
    store.put(json!({"a": "1", "long": "x".repeat(40_000)})).unwrap();
    Connection::new(Arc::new(Service::new(MetadataConfig::default(), store).unwrap()))
}

/// All that can be read, and whether the connection has ended.
fn rest(connection: &mut Connection) -> (String, bool) {
    let mut found = Vec::new();
    loop {
        match connection.read(1000) {
            Ok([]) => return (String::from_utf8(found).unwrap(), true),
            Ok(bytes) => found.extend_from_slice(bytes),
            Err(Errno::AGAIN) => return (String::from_utf8(found).unwrap(), false),
            Err(errno) => panic!("{errno}"),
        }
    }
}

const GET: &[u8] = b"GET /a HTTP/1.1\r\n\r\n";
const ANSWER: &str = "HTTP/1.1 200 OK\r\nServer: firn\r\nConnection: keep-alive\r\n\
                      Content-Type: text/plain\r\nContent-Length: 1\r\n\r\n1";

#[test]
fn requests_are_answered_one_after_the_other() {
    let mut connection = connection();
    assert!(!connection.is_ready());
    for byte in &GET[..GET.len() - 1] {
        assert_eq!(connection.write(&[*byte]), Ok(1));
        assert!(!connection.is_ready());
    }
    assert_eq!(connection.write(b"\n"), Ok(1));
    assert!(connection.is_ready());
    assert_eq!(rest(&mut connection), (ANSWER.to_owned(), false));
    assert!(!connection.is_ready());
    // Three at once.
    connection.write(&GET.repeat(3)).unwrap();
    assert_eq!(rest(&mut connection), (ANSWER.repeat(3), false));
    assert_eq!((connection.requests.capacity(), connection.answer.capacity()), (0, 0));
    connection.shut();
    assert!(connection.is_ready());
    assert_eq!(rest(&mut connection), (String::new(), true));
}

#[test]
fn a_guest_that_has_sent_all_gets_its_answers() {
    let mut connection = connection();
    connection.write(&GET.repeat(2)).unwrap();
    connection.write(b"GET /").unwrap();
    connection.shut();
    assert_eq!(rest(&mut connection), (ANSWER.repeat(2), true));
}

#[test]
fn the_last_answer_ends_the_connection() {
    for request in
        [&b"GET /a HTTP/1.0\r\n\r\n"[..], b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n"]
    {
        let mut connection = connection();
        connection.write(&[request, GET].concat()).unwrap();
        let (answer, ended) = rest(&mut connection);
        assert!(ended && answer.contains("\r\nConnection: close\r\n"), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
        // What follows is ignored.
        assert_eq!(connection.write(GET), Ok(GET.len()));
        assert_eq!(rest(&mut connection), (String::new(), true));
    }
}

#[test]
fn what_is_no_request_gets_an_error_and_the_end() {
    let mut connection = connection();
    connection.write(b"\x16\x03\x01").unwrap();
    let (answer, ended) = rest(&mut connection);
    assert!(ended && answer.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{answer}");
    assert!(answer.ends_with("\r\n\r\nnot an HTTP request"), "{answer}");
}

#[test]
fn a_refused_method_names_those_that_are_allowed() {
    let mut connection = connection();
    connection.write(b"POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}").unwrap();
    let (answer, _) = rest(&mut connection);
    assert!(answer.starts_with("HTTP/1.1 405 Method Not Allowed\r\n"), "{answer}");
    assert!(answer.contains("\r\nAllow: GET, PUT\r\n"), "{answer}");
    // The length of what GET would have, and nothing after the headers.
    connection.write(b"HEAD /a HTTP/1.1\r\n\r\n").unwrap();
    let (answer, _) = rest(&mut connection);
    assert!(answer.contains("Content-Length: 14\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
}

#[test]
fn a_guest_that_takes_no_answer_may_not_ask_on() {
    let mut connection = connection();
    let long = b"GET /long HTTP/1.1\r\n\r\n";
    let mut asked = 0;
    while connection.write(long).is_ok() {
        asked += long.len();
        assert!(asked <= MAX_REQUEST + long.len());
    }
    assert!(asked > MAX_REQUEST - long.len(), "{asked}");
    assert!(connection.requests.len() <= MAX_REQUEST + long.len());
    assert!(connection.answer.len() < 41_000);
}

proptest! {
    #[test]
    fn any_bytes_end_or_wait(
        parts in proptest::collection::vec(
            prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..200),
                Just(GET.to_vec()),
                Just(b"\r\n".to_vec()),
                Just(b"PUT /latest/api/token HTTP/1.1\r\nX-metadata-token-ttl-seconds: ".to_vec()),
            ],
            0..20,
        ),
        room in 1..5000_usize,
    ) {
        let mut connection = connection();
        let mut read = 0;
        for part in parts {
            if connection.write(&part).is_err() {
                break;
            }
            prop_assert!(connection.requests.len() <= MAX_REQUEST);
            while connection.is_ready() {
                match connection.read(room) {
                    Ok([]) => break,
                    Ok(bytes) => {
                        prop_assert!(bytes.len() <= room);
                        read += bytes.len();
                    }
                    Err(errno) => prop_assert!(false, "ready, and {}", errno),
                }
            }
        }
        prop_assert!(read < 1 << 20);
    }
}
