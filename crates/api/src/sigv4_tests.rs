use axum::body::Body;
use axum::http::Request;
use axum::response::IntoResponse;
use proptest::prelude::{any, proptest};

use super::*;
use crate::lambda::ApiError;

const FILE: &str = "[default]\naws_access_key_id = AKIDEXAMPLE\n\
                    aws_secret_access_key = wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY\nregion = x\n\
                    [half]\naws_access_key_id = HALF\n[other]\naws_secret_access_key=s\naws_access_key_id=OTHER\n";

/// 2026-11-21 17:00:00 UTC.
const SIGNED: Duration = Duration::from_secs(1_795_280_400);

/// Requests as botocore 1.44 signs them.
fn invoke() -> axum::http::request::Builder {
    Request::post(
        "/2015-03-31/functions/arn%3Aaws%3Alambda%3Aus-east-1%3A000000000000%3Afunction%3Ahello/invocations?Qualifier=%24LATEST&A=b%20c",
    )
    .header("host", "127.0.0.1:9700")
    .header("x-amz-invocation-type", "RequestResponse")
    .header("x-amz-date", "20261121T170000Z")
    .header(
        "authorization",
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261121/us-east-1/lambda/aws4_request, \
         SignedHeaders=host;x-amz-date;x-amz-invocation-type, \
         Signature=687e174699a776eff76e25e0b3af6b66790301115ce630c283329e9ff19c8909",
    )
}

fn list() -> axum::http::request::Builder {
    Request::get("/2015-03-31/functions/")
        .header("host", "127.0.0.1:9700")
        .header("x-amz-date", "20261121T170000Z")
        .header(
            "authorization",
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261121/us-east-1/lambda/aws4_request, \
             SignedHeaders=host;x-amz-date, \
             Signature=d6de9e5df6d89f47a3755d0b6ebfb68eef2fd17ef39a33b6b3271153af328632",
        )
}

fn check(
    request: axum::http::request::Builder,
    body: &[u8],
    after: Duration,
) -> Result<(), String> {
    let (parts, _) = request.body(Body::empty()).unwrap().into_parts();
    let now = SystemTime::UNIX_EPOCH + SIGNED + after;
    let credentials = Credentials::parse(FILE).unwrap();
    let checked =
        credentials.check_head(&parts, "us-east-1", service(&parts.method, &parts.uri), now);
    checked.and_then(|checked| checked.check(&parts, &Payload::of(body))).map_err(|error| {
        let response = ApiError::from(error).into_response();
        assert_eq!(response.status(), 403);
        response.headers()["x-amzn-errortype"].to_str().unwrap().to_owned()
    })
}

fn replaced(name: &'static str, value: &str) -> axum::http::request::Builder {
    let mut request = invoke();
    request.headers_mut().unwrap().insert(name, value.parse().unwrap());
    request
}

const EVENT: &[u8] = br#"{"name":"Ada"}"#;
const INVALID: &str = "InvalidSignatureException";

#[test]
fn signatures_of_botocore_are_accepted() {
    assert_eq!(check(invoke(), EVENT, Duration::ZERO), Ok(()));
    assert_eq!(check(list(), b"", Duration::from_secs(14 * 60)), Ok(()));
}

#[test]
fn a_changed_request_is_refused() {
    let refused = Err(INVALID.to_owned());
    assert_eq!(check(invoke(), br#"{"name":"Eve"}"#, Duration::ZERO), refused);
    assert_eq!(check(replaced("x-amz-invocation-type", "Event"), EVENT, Duration::ZERO), refused);
    assert_eq!(check(replaced("host", "elsewhere"), EVENT, Duration::ZERO), refused);
    assert_eq!(check(replaced("x-amz-date", "20261121T170001Z"), EVENT, Duration::ZERO), refused);
    assert_eq!(check(invoke().uri("/2015-03-31/functions/"), EVENT, Duration::ZERO), refused);
    assert_eq!(check(list().method("DELETE"), b"", Duration::ZERO), refused);
}

#[test]
fn expired_and_invalid_signatures_are_refused() {
    let signed = |text: &str| check(replaced("authorization", text), EVENT, Duration::ZERO);
    assert_eq!(check(invoke(), EVENT, Duration::from_secs(16 * 60)), Err(INVALID.into()));
    let unsigned = Request::get("/");
    assert_eq!(
        check(unsigned, b"", Duration::ZERO),
        Err("MissingAuthenticationTokenException".into())
    );
    let scoped = |key: &str, service: &str, headers: &str| {
        signed(&format!(
            "AWS4-HMAC-SHA256 Credential={key}/20261121/us-east-1/{service}/aws4_request, SignedHeaders={headers}, Signature=00"
        ))
    };
    let unknown = Err("UnrecognizedClientException".to_owned());
    assert_eq!(scoped("NOBODY", "lambda", "host;x-amz-date"), unknown);
    assert_eq!(scoped("HALF", "lambda", "host;x-amz-date"), unknown);
    assert_eq!(scoped("OTHER", "lambda", "host;x-amz-date"), Err(INVALID.into()));
    assert_eq!(scoped("AKIDEXAMPLE", "s3", "host;x-amz-date"), Err(INVALID.into()));
    assert_eq!(scoped("AKIDEXAMPLE", "lambda", "host"), Err(INVALID.into()));
}

/// The first key of `FILE` signs `request` with these headers only, for a date and a region.
fn signed_for(
    request: &Parts,
    [date, region]: [&str; 2],
    signed: &[&str],
    body: &[u8],
) -> HeaderValue {
    let canonical = canonical_request(request, signed, &Payload::of(body));
    let secret = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";
    let mac =
        mac_of(secret, "20261121T170000Z", [date, region, "lambda", "aws4_request"], &canonical);
    let authorization = format!(
        "{ALGORITHM} Credential=AKIDEXAMPLE/{date}/{region}/lambda/aws4_request, SignedHeaders={}, Signature={}",
        signed.join(";"),
        hex(&mac.finalize().into_bytes())
    );
    authorization.parse().unwrap()
}

const SCOPE: [&str; 2] = ["20261121", "us-east-1"];

/// `list` with another signature.
fn list_signed(scope: [&str; 2], signed: &[&str]) -> Result<(), String> {
    let (parts, ()) = list().body(()).unwrap().into_parts();
    let mut request = list();
    let headers = request.headers_mut().unwrap();
    headers.insert("authorization", signed_for(&parts, scope, signed, b""));
    check(request, b"", Duration::ZERO)
}

#[test]
fn host_and_date_have_to_be_among_the_signed_headers() {
    assert_eq!(list_signed(SCOPE, &["host", "x-amz-date"]), Ok(()));
    for signed in [["x-amz-date"], ["host"]] {
        assert_eq!(list_signed(SCOPE, &signed), Err(INVALID.to_owned()), "{signed:?}");
    }
    // Without the header itself.
    let (parts, ()) = Request::get("/").body(()).unwrap().into_parts();
    let authorization = signed_for(&parts, SCOPE, &["x-amz-date"], b"");
    let request = Request::get("/").header("x-amz-date", "20261121T170000Z");
    let request = request.header("authorization", authorization);
    assert_eq!(check(request, b"", Duration::ZERO), Err(INVALID.to_owned()));
}

/// `list`, with a header that is not signed.
fn unsigned(name: &str, value: &str) -> Result<(), String> {
    check(list().header(name, value), b"", Duration::ZERO)
}

#[test]
fn headers_of_the_service_have_to_be_signed() {
    let refused = Err(INVALID.to_owned());
    assert_eq!(unsigned("x-amz-invocation-type", "Event"), refused);
    assert_eq!(unsigned("x-amz-security-token", "t"), refused);
    // Proxies add it.
    assert_eq!(unsigned("x-amzn-trace-id", "Root=1"), Ok(()));
    assert_eq!(unsigned("content-type", "text/plain"), Ok(()));
}

#[test]
fn a_signature_for_another_scope_is_refused() {
    let list = list().body(()).unwrap();
    let signed = list.headers()["authorization"].to_str().unwrap();
    let other = |from: &str, to: &str| {
        let mut request = self::list();
        let headers = request.headers_mut().unwrap();
        headers.insert("authorization", signed.replace(from, to).parse().unwrap());
        check(request, b"", Duration::ZERO)
    };
    assert_eq!(other("/20261121/", "/20261121/"), Ok(()));
    for (from, to) in [("/20261121/", "//"), ("/20261121/", "/2026/"), ("us-east-1", "eu-west-1")] {
        assert_eq!(other(from, to), Err(INVALID.to_owned()), "{to}");
    }
    // Signatures that are valid for the scope that their client signed.
    let signed = |date, region| list_signed([date, region], &["host", "x-amz-date"]);
    assert_eq!(signed("20261121", "us-east-1"), Ok(()));
    assert_eq!(signed("", "us-east-1"), Err(INVALID.to_owned()));
    assert_eq!(signed("20261121", "eu-west-1"), Err(INVALID.to_owned()));
}

#[test]
fn a_digest_in_the_head_is_checked_with_the_head() {
    // Before the body is read.
    let digest = |body: &[u8]| {
        let request = list().header(CONTENT_DIGEST, Payload::of(body).0);
        let (mut parts, _) = request.body(()).unwrap().into_parts();
        let signed = ["host", "x-amz-content-sha256", "x-amz-date"];
        let authorization = signed_for(&parts, SCOPE, &signed, b"true");
        parts.headers.insert("authorization", authorization);
        let now = SystemTime::UNIX_EPOCH + SIGNED;
        let checked =
            Credentials::parse(FILE).unwrap().check_head(&parts, "us-east-1", LAMBDA, now)?;
        checked.check(&parts, &Payload::of(b"true"))
    };
    assert!(digest(b"true").is_ok());
    assert!(digest(b"false").is_err());
}

proptest! {
    #[test]
    fn an_arbitrary_header_is_refused(text in any::<String>()) {
        let header = format!("AWS4-HMAC-SHA256 {text}");
        if let Ok(value) = HeaderValue::from_str(&header) {
            let mut request = invoke();
            request.headers_mut().unwrap().insert("authorization", value);
            assert!(check(request, EVENT, Duration::ZERO).is_err());
        }
    }
}

#[test]
fn own_signatures_equal_those_of_botocore() {
    let mut request =
        Request::get("http://127.0.0.1:9700/2015-03-31/functions/").body(Bytes::new()).unwrap();
    Credentials::parse(FILE).unwrap().sign(
        &mut request,
        "us-east-1",
        SystemTime::UNIX_EPOCH + SIGNED,
    );
    let expected = list().body(()).unwrap();
    for name in ["host", "x-amz-date", "authorization"] {
        let plain =
            |value: &HeaderValue| value.to_str().unwrap().replace(", ", ",").replace(' ', "");
        assert_eq!(plain(&request.headers()[name]), plain(&expected.headers()[name]));
    }
}
