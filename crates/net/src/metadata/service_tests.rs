use serde_json::json;

use super::*;

fn service_of(config: MetadataConfig) -> Service {
    let store = MetadataStore::default();
    let document = json!({
        "name": {"first": "Ada", "last": "Lovelace"},
        "age": 36,
        "phones": ["1", "2"],
        "a/b": "slash",
        "empty": {},
    });
    store.put(document).unwrap();
    Service::new(config, store).unwrap()
}

fn of_version(version: MetadataVersion) -> Service {
    service_of(MetadataConfig { version, ..MetadataConfig::default() })
}

fn request(method: &str, path: &str) -> Request {
    Request { method: method.to_owned(), path: path.to_owned(), ..Request::default() }
}

fn get(path: &str) -> Request {
    request("GET", path)
}

fn token(ttl: &[u8]) -> Request {
    Request { ttl: Some(("X-ttl".to_owned(), ttl.to_vec())), ..request("PUT", TOKEN_PATH) }
}

/// Status and content.
fn answer(service: &Service, request: &Request) -> (Status, String) {
    let response = service.answer(request, Instant::now());
    (response.status, response.content)
}

#[test]
fn text_is_as_that_of_ec2() {
    let service = of_version(MetadataVersion::V1);
    let cases = [
        ("/name/first", "Ada"),
        ("//name///first/", "Ada"),
        ("/name", "first\nlast"),
        ("/", "a/b\nage\nempty/\nname/\nphones"),
        ("/phones/1", "2"),
        ("/a~1b", "slash"),
        ("/empty", ""),
    ];
    for (path, content) in cases {
        assert_eq!(answer(&service, &get(path)), (Status::Ok, content.to_owned()), "{path}");
    }
    for path in ["/age", "/phones", "/phones/"] {
        assert_eq!(answer(&service, &get(path)).0, Status::NotImplemented, "{path}");
    }
    for path in ["/nothing", "/name/first/x", "/phones/2", "/name?x=1"] {
        let expected = (Status::NotFound, format!("there is no {path}"));
        assert_eq!(answer(&service, &get(path)), expected);
    }
    assert_eq!(answer(&service, &get("")).0, Status::BadRequest);
}

#[test]
fn json_is_any_value() {
    let json = |path| Request { accepts_json: true, ..get(path) };
    let service = of_version(MetadataVersion::V1);
    for (path, content) in [
        ("/age", "36"),
        ("/name/first", "\"Ada\""),
        ("/phones/", "[\"1\",\"2\"]"),
        ("/empty", "{}"),
    ] {
        let response = service.answer(&json(path), Instant::now());
        assert_eq!((response.content.as_str(), response.is_json), (content, true), "{path}");
    }
    let config = MetadataConfig { imds_compat: true, ..MetadataConfig::default() };
    let response = service_of(config).answer(&json("/name/first"), Instant::now());
    assert_eq!((response.content.as_str(), response.is_json), ("Ada", false));
}

#[test]
fn version_2_needs_a_token() {
    let service = of_version(MetadataVersion::V2);
    let path = "/name/first";
    assert_eq!(answer(&service, &get(path)).0, Status::Unauthorized);
    let response = service.answer(&token(b"21600"), Instant::now());
    assert_eq!(response.status, Status::Ok);
    assert_eq!(response.header, Some(("X-ttl".to_owned(), 21_600)));
    let with = |token: &str| Request { token: Some(token.into()), ..get(path) };
    assert_eq!(answer(&service, &with(&response.content)), (Status::Ok, "Ada".to_owned()));
    assert_eq!(answer(&service, &with("x")).0, Status::Unauthorized);
    // A clone's service.
    let other = of_version(MetadataVersion::V2);
    assert_eq!(answer(&other, &with(&response.content)).0, Status::Unauthorized);
}

#[test]
fn version_1_takes_any_token() {
    let service = of_version(MetadataVersion::V1);
    let request = Request { token: Some(b"x".to_vec()), ..get("/name/first") };
    assert_eq!(answer(&service, &request).0, Status::Ok);
    assert_eq!(answer(&service, &token(b"1")).0, Status::Ok);
}

#[test]
fn a_request_for_a_token_is_checked() {
    for version in [MetadataVersion::V1, MetadataVersion::V2] {
        let service = of_version(version);
        for ttl in [&b"0"[..], b"21601", b"-1", b"", b"x", b"99999999999999999999"] {
            assert_eq!(answer(&service, &token(ttl)).0, Status::BadRequest, "{ttl:?}");
        }
        assert_eq!(answer(&service, &request("PUT", TOKEN_PATH)).0, Status::BadRequest);
        let forwarded = Request { is_forwarded: true, ..token(b"60") };
        assert_eq!(answer(&service, &forwarded).0, Status::BadRequest);
        assert_eq!(answer(&service, &request("PUT", "/name")).0, Status::NotFound);
        let doubled = Request { path: "//latest/api//token".to_owned(), ..token(b"60") };
        assert_eq!(answer(&service, &doubled).0, Status::Ok);
        for method in ["POST", "PATCH", "DELETE", "HEAD", "get"] {
            let refused = answer(&service, &request(method, "/name"));
            assert_eq!(refused.0, Status::MethodNotAllowed);
        }
    }
}

#[test]
fn an_owner_changes_what_a_guest_reads() {
    let store = MetadataStore::default();
    let service = Service::new(MetadataConfig::default(), store.clone()).unwrap();
    assert_eq!(answer(&service, &get("/")).0, Status::NotFound);
    store.put(json!({"key": "1"})).unwrap();
    assert_eq!(answer(&service, &get("/key")).1, "1");
    store.patch(json!({"key": "2"})).unwrap();
    assert_eq!(answer(&service, &get("/key")).1, "2");
}
