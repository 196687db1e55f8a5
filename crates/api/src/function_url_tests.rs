use axum::http::Request as HttpRequest;

use super::*;
use crate::serve::open;
use crate::tests::{Client, World};

const CONFIG: &str = "/2021-10-31/functions/f/url";

/// Creates a URL, and returns its host.
async fn host_of(client: &Client, path: &str, config: &Value) -> String {
    let created = client.ask("POST", path, config).await.ok(201);
    let url = created["FunctionUrl"].as_str().unwrap();
    let host = url.strip_prefix("http://").and_then(|url| url.strip_suffix('/'));
    host.unwrap_or_else(|| panic!("{url}")).to_owned()
}

fn public(id: &str) -> Value {
    json!({
        "StatementId": id, "Action": "lambda:InvokeFunctionUrl", "Principal": "*",
        "FunctionUrlAuthType": "NONE",
    })
}

#[tokio::test]
async fn the_url_of_a_function_is_created_changed_and_deleted() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    client.get(CONFIG).await.refused(404, "ResourceNotFoundException");
    let cors = json!({
        "AllowCredentials": true, "AllowHeaders": ["date"], "AllowMethods": ["*"],
        "AllowOrigins": ["https://example.org"], "ExposeHeaders": ["date"], "MaxAge": 86_400,
    });
    let config = json!({ "AuthType": "NONE", "Cors": cors, "InvokeMode": "BUFFERED" });
    let created = client.ask("POST", CONFIG, &config).await.ok(201);
    assert_eq!((&created["Cors"], &created["AuthType"]), (&cors, &json!("NONE")));
    assert_eq!(created["FunctionArn"], "arn:aws:lambda:eu-north-1:123456789012:function:f");
    assert_eq!(client.get(CONFIG).await.ok(200), created);
    client.ask("POST", CONFIG, &config).await.refused(409, "ResourceConflictException");
    let updated = client.ask("PUT", CONFIG, &json!({ "AuthType": "AWS_IAM" })).await.ok(200);
    assert_eq!((&updated["Cors"], &updated["AuthType"]), (&cors, &json!("AWS_IAM")));
    assert_eq!(updated["FunctionUrl"], created["FunctionUrl"]);
    let other = json!({ "Cors": { "AllowOrigins": ["*"] } });
    let updated = client.ask("PUT", CONFIG, &other).await.ok(200);
    assert_eq!((&updated["Cors"], &updated["AuthType"]), (&other["Cors"], &json!("AWS_IAM")));

    for (change, mode) in [
        (json!({ "InvokeMode": "RESPONSE_STREAM" }), "RESPONSE_STREAM"),
        (json!({ "AuthType": "AWS_IAM" }), "RESPONSE_STREAM"),
        (json!({ "InvokeMode": "BUFFERED" }), "BUFFERED"),
    ] {
        let updated = client.ask("PUT", CONFIG, &change).await.ok(200);
        assert_eq!(updated["InvokeMode"], mode);
        assert_eq!(client.get(CONFIG).await.ok(200), updated);
    }

    let alias = json!({ "Name": "live", "FunctionVersion": "$LATEST" });
    client.ask("POST", "/2015-03-31/functions/f/aliases", &alias).await.ok(201);
    let of_alias = format!("{CONFIG}?Qualifier=live");
    let streams = json!({ "AuthType": "NONE", "InvokeMode": "RESPONSE_STREAM" });
    let created = client.ask("POST", &of_alias, &streams).await.ok(201);
    assert_eq!(created["InvokeMode"], "RESPONSE_STREAM");
    let listed = client.get(&format!("{CONFIG}s")).await.ok(200);
    assert_eq!(listed["FunctionUrlConfigs"].as_array().unwrap().len(), 2);

    let (value, rule) = ("InvalidParameterValueException", "ValidationException");
    for (path, config, kind) in [
        (CONFIG, json!({}), rule),
        (CONFIG, json!({ "AuthType": "ALL" }), rule),
        (CONFIG, json!({ "AuthType": "NONE", "InvokeMode": "x" }), rule),
        (CONFIG, json!({ "AuthType": "NONE", "Cors": { "MaxAge": 86_401 } }), rule),
        (CONFIG, json!({ "AuthType": "NONE", "Cors": { "AllowMethods": ["OPTIONS"] } }), rule),
        (CONFIG, json!({ "AuthType": "NONE", "Cors": { "AllowOrigins": ["a b"] } }), rule),
        (CONFIG, json!({ "AuthType": "NONE", "Future": 1 }), value),
        ("/2021-10-31/functions/f/url?Qualifier=1", json!({ "AuthType": "NONE" }), rule),
    ] {
        client.ask("POST", path, &config).await.refused(400, kind);
    }
    client.ask("DELETE", CONFIG, &Value::Null).await.ok(204);
    client.ask("DELETE", CONFIG, &Value::Null).await.refused(404, "ResourceNotFoundException");
    client.get(CONFIG).await.refused(404, "ResourceNotFoundException");
}

#[tokio::test]
async fn a_url_without_signatures_requires_a_permission() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    let config = json!({ "AuthType": "NONE", "Cors": { "AllowOrigins": ["*"], "MaxAge": 5 } });
    let host = host_of(&client, CONFIG, &config).await;
    let send = |method: &str, host: &str| {
        // Pages of other origins may use it, with any type of body.
        let request = HttpRequest::builder().method(method).uri("/a?b=1").header("host", host);
        let request =
            request.header("origin", "https://x.org").header("content-type", "text/plain");
        client.send(request, "x")
    };
    send("POST", &host).await.refused(403, "AccessDeniedException");
    let policy = "/2015-03-31/functions/f/policy";
    for (more, id) in [
        (json!({ "Principal": "111122223333" }), "account"),
        (json!({ "FunctionUrlAuthType": "AWS_IAM" }), "signed"),
        (json!({ "SourceAccount": "111122223333" }), "source"),
        (json!({ "Action": "lambda:InvokeFunction", "FunctionUrlAuthType": null }), "other"),
    ] {
        let mut permission = public(id);
        permission.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        client.ask("POST", policy, &permission).await.ok(201);
        send("POST", &host).await.refused(403, "AccessDeniedException");
    }
    client.ask("POST", policy, &public("all")).await.ok(201);
    // The program that runs microVMs fails.
    for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD"] {
        let answer = send(method, &host).await;
        assert_eq!(
            (answer.status, answer.header("access-control-allow-origin")),
            (500, "https://x.org")
        );
    }
    let (_, rest) = host.split_once('.').unwrap();
    let absent = format!("{}.{rest}", "0".repeat(32));
    send("POST", &absent).await.refused(403, "AccessDeniedException");
    // Another host with its id, as a proxy has it.
    let (id, _) = host.split_once('.').unwrap();
    assert_eq!(send("POST", &format!("{id}.lambda-url.example.org")).await.status, 500);
    client.ask("DELETE", &format!("{policy}/all"), &Value::Null).await.ok(204);
    send("POST", &host).await.refused(403, "AccessDeniedException");

    // A browser's question needs no permission.
    let question = HttpRequest::builder().method("OPTIONS").uri("/").header("host", &host);
    let question = question.header("origin", "https://x.org");
    let asked = question.header("access-control-request-method", "PUT");
    let answer = client.send(asked, "").await;
    assert_eq!((answer.status, answer.header("access-control-max-age")), (200, "5"));

    client.ask("POST", policy, &public("all")).await.ok(201);
    client.ask("DELETE", "/2015-03-31/functions/f", &Value::Null).await.ok(204);
    client.created("f").await;
    send("POST", &host).await.refused(403, "AccessDeniedException");
}

#[tokio::test]
async fn a_signed_url_serves_the_tenant() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    let host = host_of(&client, CONFIG, &json!({ "AuthType": "AWS_IAM" })).await;
    let request = || HttpRequest::post("/").header("host", &host);
    // Without credentials there is no key to sign with.
    client.send(request(), "{}").await.refused(403, "AccessDeniedException");
    drop(client);
    let credentials = world.credentials();
    let client = world.start_with(|options| options.credentials = Some(credentials)).await;
    client.send(request(), "{}").await.refused(403, "MissingAuthenticationTokenException");
    let mut signed = HttpRequest::post(format!("http://{host}/")).body(Bytes::from("{}")).unwrap();
    let now = std::time::SystemTime::now();
    // It is signed for Lambda, although STS has the same method and path.
    world.credentials().sign_for(&mut signed, "eu-north-1", crate::sigv4::LAMBDA, now);
    for _sent_again in 0..2 {
        assert_eq!(client.send_signed(&signed).await.status, 500);
    }
    let mut other = HttpRequest::post(format!("http://{host}/")).body(Bytes::from("{}")).unwrap();
    world.credentials().sign_for(&mut other, "eu-north-1", "s3", now);
    client.send_signed(&other).await.refused(403, "InvalidSignatureException");
}

/// The event of a request.
fn event_of(request: axum::http::request::Builder, body: &'static str, signed: bool) -> Value {
    let world = World::new();
    let control = open(&world.options()).unwrap();
    let scope = Scope { region: "eu-north-1".into(), account: "123456789012".into() };
    let (parts, ()) = request.body(()).unwrap().into_parts();
    let url = firn_control::FunctionUrl {
        id: "ab".repeat(16),
        signed,
        stream: false,
        cors: None,
        created: String::new(),
        modified: String::new(),
    };
    let target = firn_control::Target::new("f", None).unwrap();
    let call = Call {
        control: &control,
        scope: &scope,
        url: UrlRequest { target, url, public: true },
        tenant: signed.then(|| "shop".to_owned()),
        parts,
        body: Bytes::from(body),
        received: Instant::now(),
        hold: None,
    };
    event(&call, "id")
}

#[tokio::test]
async fn a_request_is_an_event_of_format_2() {
    let request = HttpRequest::put("/a%20b/c?x=1&y=%20z&x=2")
        .header("host", "abc.lambda-url.eu-north-1.localhost:9700")
        .header("X-One", "1")
        .header("x-one", "2")
        .header("cookie", "a=b; c=d")
        .header("user-agent", "test")
        .header("content-type", "application/json; charset=utf-8")
        .extension(Source(Some([127, 0, 0, 9].into())));
    let mut event = event_of(request, "{\"k\": 1}", false);
    let context = event["requestContext"].take();
    let expected = json!({
        "version": "2.0", "routeKey": "$default", "rawPath": "/a%20b/c",
        "rawQueryString": "x=1&y=%20z&x=2", "cookies": ["a=b", "c=d"],
        "headers": {
            "host": "abc.lambda-url.eu-north-1.localhost:9700", "x-one": "1,2",
            "user-agent": "test", "content-type": "application/json; charset=utf-8",
        },
        "queryStringParameters": { "x": "1,2", "y": " z" },
        "requestContext": null, "body": "{\"k\": 1}", "isBase64Encoded": false,
    });
    assert_eq!(event, expected);
    let http = json!({
        "method": "PUT", "path": "/a%20b/c", "protocol": "HTTP/1.1", "sourceIp": "127.0.0.9",
        "userAgent": "test",
    });
    assert_eq!(context["http"], http);
    assert_eq!(context["domainName"], "abc.lambda-url.eu-north-1.localhost");
    assert_eq!(
        (&context["accountId"], &context["stage"]),
        (&json!("anonymous"), &json!("$default"))
    );
    assert_eq!(context.get("authorizer"), None);
    assert!(context["timeEpoch"].is_i64(), "{context}");

    let binary = HttpRequest::post("/").header("content-type", "image/png");
    let event = event_of(binary, "png", true);
    assert_eq!((&event["body"], &event["isBase64Encoded"]), (&json!("cG5n"), &json!(true)));
    assert_eq!(event["requestContext"]["authorizer"]["iam"]["callerId"], "shop");
    assert_eq!((event.get("cookies"), event.get("queryStringParameters")), (None, None));
    assert_eq!(event_of(HttpRequest::get("/"), "", false).get("body"), None);
}

#[tokio::test]
async fn an_answer_is_a_response() {
    let read = async |json: &str| {
        let (parts, body) = response(json.as_bytes())?.into_parts();
        let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        Some((parts.status.as_u16(), parts.headers, body))
    };
    for json in ["\"text\"", "{\"a\": 1}", "[1]", "null"] {
        let (status, headers, body) = read(json).await.unwrap();
        assert_eq!(
            (status, &headers[CONTENT_TYPE], &body[..]),
            (200, &HeaderValue::from_static("application/json"), json.as_bytes())
        );
    }
    let described = json!({
        "statusCode": 201, "headers": { "Content-Type": "text/html", "x-n": 1, "Content-Length": "9" },
        "cookies": ["a=b", "c=d"], "body": "PGI+", "isBase64Encoded": true,
    });
    let (status, headers, body) = read(&described.to_string()).await.unwrap();
    assert_eq!(
        (status, &headers[CONTENT_TYPE], &headers["x-n"], &body[..]),
        (201, &HeaderValue::from_static("text/html"), &HeaderValue::from_static("1"), &b"<b>"[..])
    );
    let cookies: Vec<_> = headers.get_all(SET_COOKIE).iter().collect();
    assert_eq!(cookies, ["a=b", "c=d"]);
    let (status, headers, body) = read(r#"{"statusCode": 204}"#).await.unwrap();
    assert_eq!((status, body.len(), headers.contains_key(CONTENT_TYPE)), (204, 0, true));
    for bad in [
        r#"{"statusCode": 99999}"#,
        r#"{"statusCode": "x"}"#,
        r#"{"statusCode": 200, "body": {}}"#,
        r#"{"statusCode": 200, "body": "%", "isBase64Encoded": true}"#,
        r#"{"statusCode": 200, "headers": {"a b": "c"}}"#,
        r#"{"statusCode": 200, "headers": {"a": "b\nc"}}"#,
        r#"{"statusCode": 200, "headers": {"a": []}}"#,
    ] {
        assert!(read(bad).await.is_none(), "{bad}");
    }
}

#[test]
fn pages_of_the_listed_origins_may_use_it() {
    let cors = Cors {
        allow_credentials: Some(true),
        allow_headers: Some(vec!["date".into(), "x-a".into()]),
        allow_methods: Some(vec!["GET".into()]),
        allow_origins: Some(vec!["https://a.org".into()]),
        expose_headers: Some(vec!["x-b".into()]),
        max_age: Some(9),
    };
    let answered = |origin: &'static str, preflight| {
        // The function's own headers have no effect.
        let mut headers = HeaderMap::new();
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("https://evil.org"));
        allow(&cors, &HeaderValue::from_static(origin), preflight, &mut headers);
        let found = headers.iter().map(|(name, value)| {
            format!("{}: {}", name.as_str().replace("access-control-", ""), value.to_str().unwrap())
        });
        let mut found: Vec<_> = found.collect();
        found.sort();
        found
    };
    assert_eq!(answered("https://b.org", false), ["vary: Origin"]);
    let own = [
        "allow-credentials: true",
        "allow-origin: https://a.org",
        "expose-headers: x-b",
        "vary: Origin",
    ];
    assert_eq!(answered("https://a.org", false), own);
    let preflight = [
        "allow-credentials: true",
        "allow-headers: date,x-a",
        "allow-methods: GET",
        "allow-origin: https://a.org",
        "max-age: 9",
        "vary: Origin",
    ];
    assert_eq!(answered("https://a.org", true), preflight);
}
