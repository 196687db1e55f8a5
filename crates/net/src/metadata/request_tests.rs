use proptest::prelude::*;

use super::*;

fn request(text: &str) -> Request {
    match parse(text.as_bytes()) {
        Parsed::Request(request, len) if len == text.len() => request,
        other => panic!("{text:?}: {other:?}"),
    }
}

#[test]
fn the_parts_of_a_request_are_found() {
    let found = request(
        "PUT /a/b HTTP/1.1\r\nHost: x\r\nX-Metadata-TOKEN-ttl-seconds: 60\r\n\
         X-aws-ec2-metadata-token: abc\r\nX-Forwarded-For: 1\r\n\r\n",
    );
    let expected = Request {
        method: "PUT".to_owned(),
        path: "/a/b".to_owned(),
        token: Some(b"abc".to_vec()),
        ttl: Some(("X-Metadata-TOKEN-ttl-seconds".to_owned(), b"60".to_vec())),
        is_forwarded: true,
        accepts_json: false,
        closes: false,
    };
    assert_eq!(found, expected);
    let found = request(
        "GET / HTTP/1.1\r\nx-metadata-token: t\r\nX-aws-ec2-metadata-token-ttl-seconds: 7\r\n\r\n",
    );
    assert_eq!(found.token.as_deref(), Some(&b"t"[..]));
    assert_eq!(found.ttl.unwrap().0, "X-aws-ec2-metadata-token-ttl-seconds");
}

#[test]
fn a_target_may_be_absolute() {
    let path = |target: &str| request(&format!("GET {target} HTTP/1.1\r\n\r\n")).path;
    assert_eq!(path("/x"), "/x");
    assert_eq!(path("http://169.254.169.254/x/y"), "/x/y");
    assert_eq!(path("HTTP://169.254.169.254:80/"), "/");
    assert_eq!(path("http://169.254.169.254"), "");
    assert_eq!(path("http://"), "");
    assert_eq!(path("*"), "");
    assert_eq!(path("x"), "");
}

#[test]
fn json_is_accepted_where_it_is_first() {
    let accepts =
        |value: &str| request(&format!("GET / HTTP/1.1\r\nAccept: {value}\r\n\r\n")).accepts_json;
    assert!(accepts("application/json"));
    assert!(accepts("text/html, Application/JSON;q=0.9, */*"));
    assert!(!accepts("*/*"));
    assert!(!accepts("text/plain, application/json"));
    assert!(!accepts("image/png"));
    assert!(!accepts(""));
}

#[test]
fn a_connection_ends_as_the_request_has_it() {
    let closes = |text: &str| request(text).closes;
    assert!(!closes("GET / HTTP/1.1\r\n\r\n"));
    assert!(closes("GET / HTTP/1.1\r\nConnection: Close\r\n\r\n"));
    assert!(closes("GET / HTTP/1.1\r\nConnection: te, close\r\n\r\n"));
    assert!(closes("GET / HTTP/1.0\r\n\r\n"));
    assert!(!closes("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"));
}

#[test]
fn a_request_is_complete_with_its_content() {
    let text = b"PUT / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET";
    assert!(matches!(parse(text), Parsed::Request(_, 40)));
    for len in 0..40 {
        assert!(matches!(parse(&text[..len]), Parsed::Partial), "{len}");
    }
}

#[test]
fn what_is_no_request_is_named() {
    let head = |header: &str| format!("GET / HTTP/1.1\r\n{header}\r\n\r\n").into_bytes();
    let many: String = (0..65).map(|n| format!("a{n}: b\r\n")).collect();
    let cases = [
        (b"\x16\x03\x01\x02\x00".to_vec(), "not an HTTP request"),
        (b"GET / HTTP/2.0\r\n\r\n".to_vec(), "not an HTTP request"),
        (head("Content-Length: x"), "a wrong Content-Length"),
        (head("Content-Length: +1"), "a wrong Content-Length"),
        (head("Content-Length:"), "a wrong Content-Length"),
        (head("Content-Length: 1\r\nContent-Length: 2"), "two lengths"),
        (head("Content-Length: 18446744073709551615"), "too large"),
        (head("Content-Length: 8192"), "too large"),
        (head("Transfer-Encoding: chunked"), "has no length"),
        (head(many.trim_end()), "too many headers"),
        (vec![b'A'; MAX_REQUEST], "too large"),
        ([b"GET /".to_vec(), vec![b'a'; MAX_REQUEST]].concat(), "too large"),
    ];
    for (bytes, reason) in cases {
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(99)]).into_owned();
        match parse(&bytes) {
            Parsed::Invalid(found) => assert!(found.contains(reason), "{text}: {found}"),
            other => panic!("{text}: {other:?}"),
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_parsed(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Parsed::Request(_, len) = parse(&bytes) {
            prop_assert!(len <= bytes.len());
        }
    }

    #[test]
    fn any_headers_are_parsed(text in "(GET|PUT|X) (/|http://|\\*)[ -~]{0,20} HTTP/1.[0-2]\r\n\
        ((Content-Length|Accept|Connection|X-metadata-token|[a-z]{1,3}): [ -~]{0,20}\r\n){0,5}\r\n") {
        if let Parsed::Request(request, len) = parse(text.as_bytes()) {
            prop_assert!(len <= text.len());
            prop_assert!(request.path.is_empty() || request.path.starts_with('/'));
        }
    }
}
