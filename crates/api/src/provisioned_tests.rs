//! Provisioned concurrency, without microVMs: each start fails.

use std::time::Duration;

use firn_control::Quotas;
use serde_json::{Value, json};

use crate::serve::{open, router};
use crate::tests::{Client, World};

const ONE: &str = "/2015-03-31/functions/f";
const PROVISIONED: &str = "/2019-09-30/functions/f/provisioned-concurrency";
const RESERVED: &str = "/2017-10-31/functions/f/concurrency";
const INVALID: &str = "InvalidParameterValueException";
const CONFLICT: &str = "ResourceConflictException";
const NONE: &str = "ProvisionedConcurrencyConfigNotFoundException";

fn of(qualifier: &str) -> String {
    format!("{PROVISIONED}?Qualifier={qualifier}")
}

fn count(count: u32) -> Value {
    json!({ "ProvisionedConcurrentExecutions": count })
}

/// A function with three versions and the alias `live` of the first one.
async fn function(world: &World) -> Client {
    let client = world.start_with(|options| options.control.monitors = 5).await;
    client.created("f").await;
    for memory in [200, 201, 202] {
        let change = json!({ "MemorySize": memory });
        client.ask("PUT", &format!("{ONE}/configuration"), &change).await.ok(200);
        client.ask("POST", &format!("{ONE}/versions"), &Value::Null).await.ok(201);
    }
    let alias = json!({ "Name": "live", "FunctionVersion": "1" });
    client.ask("POST", &format!("{ONE}/aliases"), &alias).await.ok(201);
    client
}

/// The configuration of an alias or version, once it has the status.
async fn state(client: &Client, qualifier: &str, expected: &str) -> Value {
    loop {
        let found = client.get(&of(qualifier)).await.ok(200);
        if found["Status"] == expected {
            return found;
        }
        assert_eq!(found["Status"], "IN_PROGRESS", "{found}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_version_and_an_alias_have_provisioned_concurrency() {
    let world = World::new();
    let client = function(&world).await;
    client.get(&of("live")).await.refused(404, NONE);
    let put = client.ask("PUT", &of("live"), &count(2)).await.ok(202);
    assert_eq!(put["RequestedProvisionedConcurrentExecutions"], 2);
    assert_eq!(put["AllocatedProvisionedConcurrentExecutions"], 0);
    client.ask("PUT", &of("3"), &count(1)).await.ok(202);
    // The configuration of the alias is not one of its version.
    client.get(&of("1")).await.refused(404, NONE);
    let failed = state(&client, "live", "FAILED").await;
    assert!(failed["StatusReason"].as_str().unwrap().contains("no microVM started"), "{failed}");

    let listed = client.get(&format!("{PROVISIONED}?List=ALL&MaxItems=1")).await.ok(200);
    let configs = listed["ProvisionedConcurrencyConfigs"].as_array().unwrap();
    assert!(configs[0]["FunctionArn"].as_str().unwrap().ends_with(":f:live"), "{listed}");
    let marker = listed["NextMarker"].as_str().unwrap();
    let rest = client.get(&format!("{PROVISIONED}?List=ALL&Marker={marker}")).await.ok(200);
    let configs = rest["ProvisionedConcurrencyConfigs"].as_array().unwrap();
    assert_eq!(configs[0]["RequestedProvisionedConcurrentExecutions"], 1, "{rest}");
    assert_eq!((configs.len(), &rest["NextMarker"]), (1, &Value::Null));

    // It lasts, and goes with the alias to another version.
    let alias = json!({ "FunctionVersion": "2" });
    client.ask("PUT", &format!("{ONE}/aliases/live"), &alias).await.ok(200);
    drop(client);
    let options = world.options();
    let control = loop {
        // The earlier one ends with a start that is under way.
        match open(&options) {
            Ok(control) => break control,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    control.recover().await.unwrap();
    let client = Client { router: router(control, &options) };
    let found = state(&client, "live", "FAILED").await;
    assert_eq!(found["RequestedProvisionedConcurrentExecutions"], 2);
    client.ask("DELETE", &of("live"), &Value::Null).await.ok(204);
    client.ask("DELETE", &of("live"), &Value::Null).await.ok(204);
    client.get(&of("live")).await.refused(404, NONE);
    // It ends with its version.
    client.ask("DELETE", &format!("{ONE}?Qualifier=3"), &Value::Null).await.ok(204);
    let listed = client.get(&format!("{PROVISIONED}?List=ALL")).await.ok(200);
    assert_eq!(listed["ProvisionedConcurrencyConfigs"], json!([]));
}

#[tokio::test]
async fn provisioned_concurrency_that_cannot_be_is_refused() {
    let world = World::new();
    let client = function(&world).await;
    let rule = "ValidationException";
    client.ask("PUT", PROVISIONED, &count(1)).await.refused(400, rule);
    client.ask("PUT", &of("1"), &count(0)).await.refused(400, rule);
    client.ask("PUT", &of("1"), &json!({})).await.refused(400, rule);
    client.ask("PUT", &of("$LATEST"), &count(1)).await.refused(400, INVALID);
    client.get(&of("$LATEST")).await.refused(400, INVALID);
    client.ask("DELETE", &of("$LATEST"), &Value::Null).await.refused(400, INVALID);
    for missing in ["9", "none"] {
        client.ask("PUT", &of(missing), &count(1)).await.refused(404, "ResourceNotFoundException");
    }
    // The daemon runs five microVMs.
    client.ask("PUT", &of("1"), &count(6)).await.refused(400, INVALID);
    client.get(&of("1")).await.refused(404, NONE);

    // One version has the configuration of one name.
    let alias = format!("{ONE}/aliases/live");
    let names = async |change: Value| client.ask("PUT", &alias, &change).await;
    client.ask("PUT", &of("1"), &count(1)).await.ok(202);
    client.ask("PUT", &of("live"), &count(1)).await.refused(409, CONFLICT);
    names(json!({ "FunctionVersion": "2" })).await.ok(200);
    client.ask("PUT", &of("live"), &count(1)).await.ok(202);
    client.ask("PUT", &of("2"), &count(1)).await.refused(409, CONFLICT);
    names(json!({ "FunctionVersion": "1" })).await.refused(409, CONFLICT);
    names(json!({ "FunctionVersion": "$LATEST" })).await.refused(400, INVALID);
    let weights = json!({ "RoutingConfig": { "AdditionalVersionWeights": { "3": 0.5 } } });
    names(weights.clone()).await.refused(400, INVALID);
    assert_eq!(client.get(&alias).await.ok(200)["FunctionVersion"], "2");

    // A limit of requests is not lower.
    let reserve = |most: u32| json!({ "ReservedConcurrentExecutions": most });
    client.ask("PUT", RESERVED, &reserve(1)).await.refused(400, INVALID);
    client.ask("PUT", RESERVED, &reserve(2)).await.ok(200);
    client.ask("PUT", &of("1"), &count(2)).await.refused(400, INVALID);
    client.ask("DELETE", &of("live"), &Value::Null).await.ok(204);
    client.ask("PUT", &of("1"), &count(2)).await.ok(202);
    client.ask("DELETE", RESERVED, &Value::Null).await.ok(204);

    names(weights).await.ok(200);
    client.ask("PUT", &of("live"), &count(1)).await.refused(400, INVALID);

    // A version with SnapStart, however it gets to it.
    let change = json!({ "SnapStart": { "ApplyOn": "PublishedVersions" } });
    client.ask("PUT", &format!("{ONE}/configuration"), &change).await.ok(200);
    client.ask("POST", &format!("{ONE}/versions"), &Value::Null).await.ok(201);
    let refused = client.ask("PUT", &of("4"), &count(1)).await;
    assert!(refused.refused(400, INVALID).contains("SnapStart"));
    let plain = json!({ "FunctionVersion": "2", "RoutingConfig": {} });
    names(plain).await.ok(200);
    client.ask("PUT", &of("live"), &count(1)).await.ok(202);
    names(json!({ "FunctionVersion": "4" })).await.refused(400, INVALID);
}

#[tokio::test]
async fn a_tenant_provisions_no_more_than_its_quota() {
    let world = World::new();
    let quotas = Quotas { provisioned: Some(3), ..Quotas::default() };
    let client = world.start_with(|options| options.control.tenants.default = quotas).await;
    for name in ["f", "g"] {
        client.created(name).await;
        let versions = format!("/2015-03-31/functions/{name}/versions");
        client.ask("POST", &versions, &Value::Null).await.ok(201);
    }
    client.ask("PUT", &of("1"), &count(2)).await.ok(202);
    let other = of("1").replace("/f/", "/g/");
    let refused = client.ask("PUT", &other, &count(2)).await;
    assert!(refused.refused(402, "ServiceQuotaExceededException").contains("quota"));
    client.ask("PUT", &other, &count(1)).await.ok(202);
}
