//! Layers: what is refused, which zip files are kept, and whose they are.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::tests::{Client, World, zip_of};

const ONE: &str = "/2015-03-31/functions/f/configuration";
const INVALID: &str = "InvalidParameterValueException";
const RULE: &str = "ValidationException";

async fn publish(client: &Client, name: &str, source: &str) -> String {
    let zip = STANDARD.encode(zip_of(source));
    let path = format!("/2018-10-31/layers/{name}/versions");
    let published = client.ask("POST", &path, &json!({ "Content": { "ZipFile": zip } })).await;
    published.ok(201)["LayerVersionArn"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn layers_that_a_function_cannot_have_are_refused() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    let first = publish(&client, "shared", "x = 1").await;
    let second = publish(&client, "shared", "x = 2").await;
    let mut many = vec![first.clone()];
    for number in 0..5 {
        many.push(publish(&client, &format!("l{number}"), "x = 1").await);
    }
    let missing = first.replace(":shared:1", ":shared:3");
    let does_not_exist = format!("Layer version {missing} does not exist.");
    let other_region = first.replace("eu-north-1", "us-east-1");
    let other_account = first.replace("123456789012", "111122223333");
    for (layers, status, kind, text) in [
        (json!([missing]), 400, INVALID, does_not_exist.as_str()),
        (json!([first.replace("shared", "other")]), 400, INVALID, "does not exist."),
        (json!([first, second]), 400, INVALID, "are versions of the same layer."),
        (json!(many), 400, INVALID, "Cannot reference more than 5 layers."),
        (json!([other_region]), 400, INVALID, "expected to be in region eu-north-1"),
        (json!([other_account]), 403, "AccessDeniedException", "the account of this daemon is"),
        (json!(["shared"]), 400, RULE, "'layers'"),
        (json!([first.replace(":1", ":x")]), 400, RULE, "'layers'"),
    ] {
        let refused = client.ask("PUT", ONE, &json!({ "Layers": layers })).await;
        let message = refused.refused(status, kind);
        assert!(message.contains(text), "{layers}: {message}");
        let refused = client.create("g", &json!({ "Layers": layers })).await;
        assert!(refused.refused(status, kind).contains(text), "{layers}");
    }
    assert_eq!(client.get(ONE).await.ok(200).get("Layers"), None);
    let updated = client.ask("PUT", ONE, &json!({ "Layers": many[1..] })).await.ok(200);
    let arns: Vec<Value> =
        updated["Layers"].as_array().unwrap().iter().map(|layer| layer["Arn"].clone()).collect();
    assert_eq!(json!(arns), json!(many[1..]));
    // Another setting leaves them as they are.
    client.ask("PUT", ONE, &json!({ "Timeout": 9 })).await.ok(200);
    assert_eq!(client.get(ONE).await.ok(200)["Layers"], updated["Layers"]);

    let path = "/2018-10-31/layers/shared/versions";
    for (body, text) in [
        (json!({ "CompatibleArchitectures": ["mips"] }), "'compatibleArchitectures'"),
        (json!({ "CompatibleRuntimes": ["no runtime"] }), "'compatibleRuntimes'"),
        (json!({ "LicenseInfo": "x".repeat(513) }), "'licenseInfo'"),
        (json!({ "Description": "x".repeat(257) }), "'description'"),
    ] {
        let mut layer = json!({ "Content": { "ZipFile": STANDARD.encode(zip_of("")) } });
        layer.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        let message = client.ask("POST", path, &layer).await.refused(400, RULE);
        assert!(message.contains(text), "{text}: {message}");
    }
    let s3 = json!({ "Content": { "S3Bucket": "b", "S3Key": "k" } });
    let message = client.ask("POST", path, &s3).await.refused(400, INVALID);
    assert!(message.contains("only as ZipFile"), "{message}");
    let named = path.replace("shared", "a%20b");
    client.ask("POST", &named, &json!({ "Content": {} })).await.refused(400, RULE);
    let action = json!({ "StatementId": "s", "Action": "lambda:InvokeFunction", "Principal": "*" });
    client.ask("POST", &format!("{path}/1/policy"), &action).await.refused(400, RULE);
    client.get(&format!("{path}/9")).await.refused(404, "ResourceNotFoundException");
}

#[tokio::test]
async fn the_zip_file_of_a_layer_is_kept_as_long_as_it_is_used() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    let files = || world.files("code");
    assert_eq!(files(), 1);
    let arn = publish(&client, "shared", "a layer").await;
    assert_eq!(files(), 2);
    client.ask("PUT", ONE, &json!({ "Layers": [arn] })).await.ok(200);
    let versions = "/2015-03-31/functions/f/versions";
    client.ask("POST", versions, &json!({})).await.ok(201);
    // A version is new if only the layers have changed.
    client.ask("PUT", ONE, &json!({ "Layers": [] })).await.ok(200);
    assert_eq!(client.ask("POST", versions, &json!({})).await.ok(201)["Version"], "2");
    client.ask("DELETE", "/2018-10-31/layers/shared/versions/1", &Value::Null).await.ok(204);
    assert_eq!(files(), 2, "version 1 has the layer");
    client.ask("DELETE", "/2015-03-31/functions/f?Qualifier=1", &Value::Null).await.ok(204);
    assert_eq!(files(), 1);
    // Numbers are not used again.
    assert!(publish(&client, "shared", "a layer").await.ends_with(":shared:2"));
}
