//! Two tenants of one daemon.

use std::time::SystemTime;

use axum::body::Bytes;
use axum::http::Request;
use serde_json::{Value, json};

use crate::credentials::Credentials;
use crate::tests::{Answer, Client, World, creation};

const FUNCTIONS: &str = "/2015-03-31/functions";

/// A client with the key of a section.
struct Tenant<'a> {
    client: &'a Client,
    keys: Credentials,
}

impl Tenant<'_> {
    async fn ask(&self, method: &str, path: &str, body: &Value) -> Answer {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let uri = format!("http://127.0.0.1:9700{path}");
        let mut request =
            Request::builder().method(method).uri(uri).body(Bytes::from(body)).unwrap();
        self.keys.sign(&mut request, "eu-north-1", SystemTime::now());
        self.client.send_signed(&request).await
    }

    async fn create(&self, name: &str, planner: &str) -> Answer {
        let mut function = creation(name);
        function["Environment"] = json!({ "Variables": { "FIRN_PLANNER": planner } });
        self.ask("POST", FUNCTIONS, &function).await
    }
}

#[tokio::test]
async fn tenants_have_functions_and_quotas_of_their_own() {
    let section = |name: &str, more: &str| {
        format!("[{name}]\naws_access_key_id = K{name}\naws_secret_access_key = s{name}\n{more}")
    };
    let limited = section("a", "firn_planners = firecracker\nfirn_versions = 1\nfirn_code = 100\n");
    let text = format!("{limited}{}", section("b", ""));
    let world = World::new();
    let client = world
        .start_with(|options| {
            let credentials = Credentials::parse(&text).unwrap();
            options.control.tenants.named = credentials.tenants().clone();
            options.credentials = Some(credentials);
        })
        .await;
    let [a, b] = ["a", "b"].map(|name| {
        let keys = Credentials::parse(&section(name, "")).unwrap();
        Tenant { client: &client, keys }
    });
    let told = a.create("f", "dram_cached").await.refused(400, "InvalidParameterValueException");
    assert!(told.contains("allowed: firecracker"), "{told}");
    let told = a.create("f", "firecracker").await.refused(400, "CodeStorageExceededException");
    assert!(told.contains("the quota of the tenant a is 100 B"), "{told}");
    assert_eq!(world.files("code"), 0);
    b.create("f", "dram_cached").await.ok(201);
    // For another tenant the function does not exist, except that its name is in use.
    let one = format!("{FUNCTIONS}/f");
    for (method, path, body) in [
        ("GET", "", Value::Null),
        ("GET", "/configuration", Value::Null),
        ("PUT", "/configuration", json!({ "Timeout": 9 })),
        ("POST", "/versions", json!({})),
        ("GET", "/versions", Value::Null),
        ("POST", "/aliases", json!({ "Name": "x", "FunctionVersion": "$LATEST" })),
        ("GET", "/aliases", Value::Null),
        ("GET", "/aliases/x", Value::Null),
        ("PUT", "/aliases/x", json!({ "Description": "x" })),
        ("DELETE", "/aliases/x", Value::Null),
        ("POST", "/invocations", json!({})),
        ("DELETE", "", Value::Null),
    ] {
        a.ask(method, &format!("{one}{path}"), &body)
            .await
            .refused(404, "ResourceNotFoundException");
    }
    let path = "/2019-09-30/functions/f/concurrency";
    a.ask("GET", path, &Value::Null).await.refused(404, "ResourceNotFoundException");
    let listed = a.ask("GET", FUNCTIONS, &Value::Null).await.ok(200);
    assert_eq!(listed["Functions"], json!([]));
    let listed = b.ask("GET", FUNCTIONS, &Value::Null).await.ok(200);
    assert_eq!(listed["Functions"].as_array().unwrap().len(), 1);
    b.ask("GET", &format!("{one}/configuration"), &Value::Null).await.ok(200);

    // So it is for layers.
    let layers = "/2018-10-31/layers";
    let versions = format!("{layers}/shared/versions");
    let zip = creation("any")["Code"].clone();
    let layer = json!({ "Content": zip });
    let arn = b.ask("POST", &versions, &layer).await.ok(201)["LayerVersionArn"].clone();
    let one = format!("{versions}/1");
    let statement =
        json!({ "StatementId": "s", "Action": "lambda:GetLayerVersion", "Principal": "*" });
    for (method, path, body) in [
        ("GET", one.clone(), Value::Null),
        ("GET", format!("{one}/policy"), Value::Null),
        ("POST", format!("{one}/policy"), statement),
        ("DELETE", format!("{one}/policy/s"), Value::Null),
        ("GET", format!("{layers}?find=LayerVersion&Arn={}", arn.as_str().unwrap()), Value::Null),
    ] {
        a.ask(method, &path, &body).await.refused(404, "ResourceNotFoundException");
    }
    let mut function = creation("g");
    function["Layers"] = json!([arn]);
    let told =
        a.ask("POST", FUNCTIONS, &function).await.refused(400, "InvalidParameterValueException");
    assert!(told.ends_with("does not exist."), "{told}");
    a.ask("POST", &versions, &layer).await.refused(409, "ResourceConflictException");
    a.ask("DELETE", &one, &Value::Null).await.ok(204);
    let listed = async |tenant: &Tenant<'_>, path: &str, list: &str| {
        let listed = tenant.ask("GET", path, &Value::Null).await.ok(200);
        listed[list].as_array().unwrap().len()
    };
    assert_eq!(listed(&a, layers, "Layers").await, 0);
    assert_eq!(listed(&a, &versions, "LayerVersions").await, 0);
    assert_eq!(listed(&b, layers, "Layers").await, 1);
    assert_eq!(listed(&b, &versions, "LayerVersions").await, 1);
    // Their zip files and versions count: this is over the quotas of a tenant.
    let own = format!("{layers}/own/versions");
    let told = a.ask("POST", &own, &layer).await.refused(400, "CodeStorageExceededException");
    assert!(told.contains("the quota of the tenant a is 100 B"), "{told}");
}

#[tokio::test]
async fn quotas_of_the_daemon_hold_without_credentials() {
    let world = World::new();
    let client =
        world.start_with(|options| options.control.tenants.default.versions = Some(1)).await;
    client.created("f").await;
    client.created("g").await;
    client.ask("POST", &format!("{FUNCTIONS}/f/versions"), &json!({})).await.ok(201);
    let refused = client.ask("POST", &format!("{FUNCTIONS}/g/versions"), &json!({})).await;
    let told = refused.refused(402, "ServiceQuotaExceededException");
    assert!(told.starts_with("2 versions would be published, and the quota of this daemon is 1"));
    let layer = json!({ "Content": creation("f")["Code"] });
    let refused = client.ask("POST", "/2018-10-31/layers/l/versions", &layer).await;
    refused.refused(402, "ServiceQuotaExceededException");
    client.ask("DELETE", &format!("{FUNCTIONS}/f"), &Value::Null).await.ok(204);
    client.ask("POST", &format!("{FUNCTIONS}/g/versions"), &json!({})).await.ok(201);
}
