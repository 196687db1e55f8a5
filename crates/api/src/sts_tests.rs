use std::time::SystemTime;

use axum::http::Request;

use crate::credentials::Credentials;
use crate::tests::{Answer, Client, World};

const FORM: &str = "application/x-www-form-urlencoded; charset=utf-8";

async fn ask(client: &Client, body: &'static str) -> Answer {
    client.send(Request::post("/").header("content-type", FORM), body).await
}

#[track_caller]
fn has(answer: &Answer, status: u16, parts: &[&str]) {
    assert_eq!(answer.status, status, "{answer:?}");
    assert!(parts.iter().all(|part| answer.text.contains(part)), "{answer:?}");
}

#[tokio::test]
async fn a_client_finds_its_account() {
    let world = World::new();
    let client = world.start().await;
    let identity = ask(&client, "Action=GetCallerIdentity&Version=2011-06-15").await;
    let arn = "<Arn>arn:aws:iam::123456789012:root</Arn>";
    has(&identity, 200, &[arn, "<Account>123456789012</Account>", "<RequestId>"]);
    let other = ask(&client, "Action=AssumeRole&Version=2011-06-15&RoleArn=arn%3Aaws").await;
    has(&other, 400, &["<Type>Sender</Type>", "<Code>InvalidAction</Code>", "AssumeRole"]);
    has(&ask(&client, "Action").await, 400, &["<Code>ValidationException</Code>"]);
    client.get("/").await.refused(404, "UnknownOperationException");
}

#[tokio::test]
async fn requests_are_signed_for_the_service_and_may_be_sent_again() {
    let world = World::new();
    let text = "[a<b]\naws_access_key_id = K\naws_secret_access_key = s\n";
    let keys = Credentials::parse(text).unwrap();
    let client = world.start_with(|options| options.credentials = Some(keys.clone())).await;
    let body = "Action=GetCallerIdentity&Version=2011-06-15";
    has(&ask(&client, body).await, 403, &["<Code>MissingAuthenticationTokenException</Code>"]);
    let mut request = Request::post("http://127.0.0.1:9700/").body(body.into()).unwrap();
    keys.sign(&mut request, "eu-north-1", SystemTime::now());
    let signed = request.headers()["authorization"].to_str().unwrap();
    assert!(signed.contains("/eu-north-1/sts/aws4_request"), "{signed}");
    for _ in 0..2 {
        let identity = client.send_signed(&request).await;
        has(&identity, 200, &["<Arn>arn:aws:iam::123456789012:user/a&lt;b</Arn>"]);
    }
}
