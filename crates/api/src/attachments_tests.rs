//! What is attached to functions: tags, permissions, settings of events, weights of aliases.

use serde_json::{Value, json};

use crate::tests::World;

const ONE: &str = "/2015-03-31/functions/f";
const ARN: &str = "arn:aws:lambda:eu-north-1:123456789012:function:f";

#[tokio::test]
async fn a_function_has_tags() {
    let world = World::new();
    let client = world.start().await;
    client.create("f", &json!({ "Tags": { "env": "dev", "team": "" } })).await.ok(201);
    let path = format!("/2017-03-31/tags/{}", ARN.replace(':', "%3A"));
    let tags = async || client.get(&path).await.ok(200)["Tags"].clone();
    assert_eq!(tags().await, json!({ "env": "dev", "team": "" }));
    let more = json!({ "Tags": { "env": "live", "cost centre": "a/b@c" } });
    client.ask("POST", &path, &more).await.ok(204);
    let expected = json!({ "env": "live", "team": "", "cost centre": "a/b@c" });
    assert_eq!(client.get(ONE).await.ok(200)["Tags"], expected);
    let remove = format!("{path}?tagKeys=cost%20centre&tagKeys=team&tagKeys=absent");
    client.ask("DELETE", &remove, &Value::Null).await.ok(204);
    assert_eq!(tags().await, json!({ "env": "live" }));

    let many: serde_json::Map<_, _> = (0..50).map(|n| (format!("k{n}"), json!("v"))).collect();
    let value = "InvalidParameterValueException";
    for (tags, word) in [
        (json!(many), "at most 50"),
        (json!({ "": "v" }), "a key has 1 to 128"),
        (json!({ "a*": "v" }), "a*"),
        (json!({ "k".repeat(129): "v" }), "1 to 128"),
        (json!({ "aws:k": "v" }), "aws:"),
        (json!({ "k": "v".repeat(257) }), "at most 256"),
    ] {
        let refused = client.ask("POST", &path, &json!({ "Tags": tags })).await;
        let message = refused.refused(400, value);
        assert!(message.contains(word), "{word}: {message}");
    }
    client.ask("DELETE", &path, &Value::Null).await.refused(400, "ValidationException");
    client.ask("POST", &format!("{ONE}/versions"), &Value::Null).await.ok(201);
    let version = format!("{path}%3A1");
    client.ask("POST", &version, &json!({ "Tags": { "a": "b" } })).await.refused(400, value);
    assert_eq!(tags().await, json!({ "env": "live" }));
    assert_eq!(client.get(&format!("{ONE}:1")).await.ok(200)["Tags"], json!({ "env": "live" }));

    // No alias has this name.
    client.ask("DELETE", &format!("{ONE}/aliases/$LATEST"), &Value::Null).await.ok(204);
    assert_eq!(tags().await, json!({ "env": "live" }));

    // They are the function's: another one of the same name has none.
    client.ask("DELETE", ONE, &Value::Null).await.ok(204);
    client.get(&path).await.refused(404, "ResourceNotFoundException");
    client.created("f").await;
    assert_eq!(tags().await, json!({}));
    assert_eq!(client.get(ONE).await.ok(200).get("Tags"), None);
}

#[tokio::test]
async fn permissions_are_a_policy() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    client.ask("POST", &format!("{ONE}/versions"), &Value::Null).await.ok(201);
    let path = format!("{ONE}/policy");
    client.get(&path).await.refused(404, "ResourceNotFoundException");
    let add = json!({
        "StatementId": "AllowBucket", "Action": "lambda:InvokeFunction", "Principal": "s3.amazonaws.com",
        "SourceArn": "arn:aws:s3:::bucket", "SourceAccount": "111122223333",
    });
    let expected = json!({
        "Sid": "AllowBucket", "Effect": "Allow", "Principal": { "Service": "s3.amazonaws.com" },
        "Action": "lambda:InvokeFunction", "Resource": ARN,
        "Condition": {
            "StringEquals": { "AWS:SourceAccount": "111122223333" },
            "ArnLike": { "AWS:SourceArn": "arn:aws:s3:::bucket" },
        },
    });
    let json_of = |text: &Value| serde_json::from_str::<Value>(text.as_str().unwrap()).unwrap();
    let added = client.ask("POST", &path, &add).await.ok(201);
    assert_eq!(json_of(&added["Statement"]), expected);
    let again = client.ask("POST", &path, &add).await.refused(409, "ResourceConflictException");
    assert!(again.contains("AllowBucket"), "{again}");
    let first = client.get(&path).await.ok(200);
    let policy = json_of(&first["Policy"]);
    assert_eq!(
        policy,
        json!({ "Version": "2012-10-17", "Id": "default", "Statement": [expected] })
    );

    // Those of a version are its own, and the order is that of adding.
    for (id, principal) in [("b", "111122223333"), ("a", "*")] {
        let add = json!({
            "StatementId": id, "Action": "lambda:InvokeFunctionUrl", "Principal": principal,
            "FunctionUrlAuthType": "NONE",
        });
        client.ask("POST", &format!("{path}?Qualifier=1"), &add).await.ok(201);
    }
    let of_version = client.get(&format!("{path}?Qualifier=1")).await.ok(200);
    let statements = json_of(&of_version["Policy"])["Statement"].clone();
    let found = |field: &str| [statements[0][field].clone(), statements[1][field].clone()];
    assert_eq!(found("Sid"), ["b", "a"]);
    assert_eq!(
        found("Principal"),
        [json!({ "AWS": "arn:aws:iam::111122223333:root" }), json!("*")]
    );
    assert_eq!(found("Resource"), [format!("{ARN}:1"), format!("{ARN}:1")]);
    assert_eq!(
        statements[0]["Condition"],
        json!({ "StringEquals": { "lambda:FunctionUrlAuthType": "NONE" } })
    );
    assert_eq!(json_of(&client.get(&path).await.ok(200)["Policy"]), policy);

    let remove = |id: &str, rest: &str| {
        let path = format!("{path}/{id}{rest}");
        let client = &client;
        async move { client.ask("DELETE", &path, &Value::Null).await }
    };
    remove("AllowBucket", "?RevisionId=x").await.refused(412, "PreconditionFailedException");
    remove("a", "").await.refused(404, "ResourceNotFoundException");
    let current = format!("?RevisionId={}", first["RevisionId"].as_str().unwrap());
    remove("AllowBucket", &current).await.ok(204);
    client.get(&path).await.refused(404, "ResourceNotFoundException");
    let zeros = client.get(&format!("{path}?Qualifier=001")).await.ok(200);
    assert_eq!(json_of(&zeros["Policy"])["Statement"].as_array().unwrap().len(), 2);
    client.ask("DELETE", &format!("{ONE}?Qualifier=01"), &Value::Null).await.ok(204);
    let gone = client.get(&format!("{path}?Qualifier=1")).await;
    gone.refused(404, "ResourceNotFoundException");
}

#[tokio::test]
async fn permissions_that_lambda_refuses_are_refused() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    let path = format!("{ONE}/policy");
    let (value, rule) = ("InvalidParameterValueException", "ValidationException");
    for (more, kind) in [
        (json!({ "StatementId": "a b" }), rule),
        (json!({ "StatementId": "x".repeat(101) }), rule),
        (json!({ "Action": "s3:GetObject" }), rule),
        (json!({ "Action": "lambda:" }), rule),
        (json!({ "Principal": "" }), value),
        (json!({ "FunctionUrlAuthType": "ALL" }), rule),
        (json!({ "FunctionUrlAuthType": "NONE" }), value),
        (json!({ "Future": "setting" }), value),
    ] {
        let mut add =
            json!({ "StatementId": "s", "Action": "lambda:InvokeFunction", "Principal": "*" });
        add.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        client.ask("POST", &path, &add).await.refused(400, kind);
    }
    let add = json!({ "StatementId": "s", "Action": "lambda:InvokeFunction", "Principal": "*" });
    let latest = format!("{path}?Qualifier=$LATEST");
    client.ask("POST", &latest, &add).await.refused(400, value);
    let absent = format!("{path}?Qualifier=live");
    client.ask("POST", &absent, &add).await.refused(404, "ResourceNotFoundException");
    let mut long = add.clone();
    long["Principal"] = json!("x".repeat(20 << 10));
    client.ask("POST", &path, &long).await.refused(400, "PolicyLengthExceededException");
    client.get(&path).await.refused(404, "ResourceNotFoundException");
}

#[tokio::test]
async fn settings_of_events_are_put_changed_and_deleted() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    client.ask("POST", &format!("{ONE}/versions"), &Value::Null).await.ok(201);
    let live = json!({ "Name": "live", "FunctionVersion": "1" });
    client.ask("POST", &format!("{ONE}/aliases"), &live).await.ok(201);
    let path = "/2019-09-25/functions/f/event-invoke-config";
    let on = |qualifier: &str| format!("{path}?Qualifier={qualifier}");
    client.get(path).await.refused(404, "ResourceNotFoundException");
    let update = json!({ "MaximumRetryAttempts": 1 });
    client.ask("POST", path, &update).await.refused(404, "ResourceNotFoundException");
    let both = json!({
        "MaximumRetryAttempts": 0, "MaximumEventAgeInSeconds": 60,
        "DestinationConfig": { "OnSuccess": {}, "OnFailure": {} },
    });
    let put = client.ask("PUT", path, &both).await.ok(200);
    assert_eq!(put["FunctionArn"], format!("{ARN}:$LATEST"));
    assert!(put["LastModified"].is_u64(), "{put}");
    assert_eq!(client.get(path).await.ok(200), put);
    let read = |found: &Value| {
        [found["MaximumRetryAttempts"].clone(), found["MaximumEventAgeInSeconds"].clone()]
    };
    assert_eq!(read(&put), [json!(0), json!(60)]);
    let updated = client.ask("POST", path, &update).await.ok(200);
    assert_eq!(read(&updated), [json!(1), json!(60)]);
    client.ask("PUT", &on("live"), &update).await.ok(200);
    let alias = client.get(&on("live")).await.ok(200);
    assert_eq!(
        (read(&alias), &alias["FunctionArn"]),
        ([json!(1), Value::Null], &json!(format!("{ARN}:live")))
    );
    let listed = client.get(&format!("{path}/list")).await.ok(200);
    assert_eq!(listed["FunctionEventInvokeConfigs"].as_array().unwrap().len(), 2);

    for (document, kind) in [
        (json!({ "MaximumRetryAttempts": 3 }), "ValidationException"),
        (json!({ "MaximumEventAgeInSeconds": 59 }), "ValidationException"),
        (json!({ "MaximumEventAgeInSeconds": 21_601 }), "ValidationException"),
    ] {
        client.ask("PUT", path, &document).await.refused(400, kind);
    }
    client.ask("DELETE", path, &Value::Null).await.ok(204);
    client.ask("DELETE", path, &Value::Null).await.refused(404, "ResourceNotFoundException");
    // Deleting the alias deletes its settings.
    let aliases = format!("{ONE}/aliases");
    client.ask("DELETE", &format!("{aliases}/live"), &Value::Null).await.ok(204);
    client.ask("POST", &aliases, &live).await.ok(201);
    client.get(&on("live")).await.refused(404, "ResourceNotFoundException");
}

#[tokio::test]
async fn events_have_functions_as_destinations() {
    let world = World::new();
    let client = world.start().await;
    for name in ["f", "g"] {
        client.created(name).await;
    }
    let path = "/2019-09-25/functions/f/event-invoke-config";
    let other = ARN.replace("function:f", "function:g");
    let config = |success: Value, failure: Value| json!({ "DestinationConfig": { "OnSuccess": success, "OnFailure": failure } });
    let to = |arn: &str| json!({ "Destination": arn });
    let both = config(to(&other), to(&format!("{other}:$LATEST")));
    let put = client.ask("PUT", path, &both).await.ok(200);
    assert_eq!(put["DestinationConfig"], both["DestinationConfig"]);
    assert_eq!(client.get(path).await.ok(200), put);
    // A change without destinations keeps them, and one with destinations replaces both.
    let update = json!({ "MaximumRetryAttempts": 1 });
    let updated = client.ask("POST", path, &update).await.ok(200);
    assert_eq!(updated["DestinationConfig"], both["DestinationConfig"]);
    let one = config(to(&other), json!({}));
    let updated = client.ask("POST", path, &one).await.ok(200);
    assert_eq!(updated["DestinationConfig"], one["DestinationConfig"]);
    assert_eq!(updated["MaximumRetryAttempts"], 1);
    for (arn, text) in [
        ("arn:aws:sqs:eu-north-1:123456789012:q", "only functions of this daemon"),
        ("arn:aws:sns:eu-north-1:123456789012:t", "only functions of this daemon"),
        ("arn:aws:s3:::bucket", "only functions of this daemon"),
        ("arn:aws:events:eu-north-1:123456789012:event-bus/b", "only functions of this daemon"),
        (&*format!("{other}2"), "is invalid."),
        (&*format!("{other}:9"), "is invalid."),
        (ARN, "as a destination for itself"),
    ] {
        for config in [config(to(arn), json!({})), config(json!({}), to(arn))] {
            let refused = client.ask("PUT", path, &config).await;
            let message = refused.refused(400, "InvalidParameterValueException");
            assert!(message.contains(text), "{arn}: {message}");
        }
    }
    assert_eq!(client.get(path).await.ok(200)["DestinationConfig"], one["DestinationConfig"]);
    let put = client.ask("PUT", path, &json!({})).await.ok(200);
    assert_eq!(put["DestinationConfig"], json!({ "OnSuccess": {}, "OnFailure": {} }));
}

#[tokio::test]
async fn an_alias_with_weights_names_two_versions() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    for turn in 1..=3 {
        let versions = format!("{ONE}/versions");
        client.ask("POST", &versions, &Value::Null).await.ok(201);
        let configuration = json!({ "Timeout": turn + 5 });
        client.ask("PUT", &format!("{ONE}/configuration"), &configuration).await.ok(200);
    }
    let aliases = format!("{ONE}/aliases");
    let with = |weights: Value| {
        json!({
            "Name": "live", "FunctionVersion": "1",
            "RoutingConfig": { "AdditionalVersionWeights": weights },
        })
    };
    let value = "InvalidParameterValueException";
    for weights in [
        json!({ "2": 0.1, "3": 0.1 }),
        json!({ "2": 1.5 }),
        json!({ "1": 0.5 }),
        json!({ "$LATEST": 0.5 }),
    ] {
        client.ask("POST", &aliases, &with(weights)).await.refused(400, value);
    }
    let absent = client.ask("POST", &aliases, &with(json!({ "9": 0.5 }))).await;
    absent.refused(404, "ResourceNotFoundException");
    let created = client.ask("POST", &aliases, &with(json!({ "2": 1.0 }))).await.ok(201);
    let one = format!("{aliases}/live");
    assert_eq!(created["RoutingConfig"], json!({ "AdditionalVersionWeights": { "2": 1.0 } }));
    assert_eq!(client.get(&one).await.ok(200), created);
    // Reads name the first version, requests get the other one.
    let read = client.get(&format!("{ONE}/configuration?Qualifier=live")).await.ok(200);
    assert_eq!(read["Version"], "1");
    let invoked = async || {
        let path = format!("{ONE}/invocations?Qualifier=live");
        let request = axum::http::Request::post(path).header("x-amz-invocation-type", "DryRun");
        client.send(request, "1").await.executed_version().to_owned()
    };
    assert_eq!(invoked().await, "2");
    let used = client.ask("DELETE", &format!("{ONE}?Qualifier=2"), &Value::Null).await;
    assert!(used.refused(409, "ResourceConflictException").contains("live"));
    let latest = json!({ "FunctionVersion": "$LATEST" });
    client.ask("PUT", &one, &latest).await.refused(400, value);
    // Other changes keep the weights, and empty ones remove them.
    let kept = client.ask("PUT", &one, &json!({ "Description": "d" })).await.ok(200);
    assert_eq!(kept["RoutingConfig"], created["RoutingConfig"]);
    let none = json!({ "RoutingConfig": { "AdditionalVersionWeights": {} } });
    let changed = client.ask("PUT", &one, &none).await.ok(200);
    assert_eq!(changed.get("RoutingConfig"), None);
    assert_eq!(invoked().await, "1");
}

#[tokio::test]
async fn the_account_has_what_the_functions_use() {
    let world = World::new();
    let client = world.start().await;
    for name in ["f", "g"] {
        client.created(name).await;
    }
    let size = client.get(ONE).await.ok(200)["Configuration"]["CodeSize"].as_u64().unwrap();
    let account = client.get("/2016-08-19/account-settings/").await.ok(200);
    assert_eq!(account["AccountUsage"], json!({ "TotalCodeSize": size, "FunctionCount": 2 }));
    let limit = &account["AccountLimit"];
    assert_eq!(limit["ConcurrentExecutions"], 9);
    assert_eq!(limit["CodeSizeZipped"], 50 << 20);
    assert!(limit["TotalCodeSize"].as_u64().unwrap() > size, "{limit}");
    let quota = |options: &mut crate::serve::ServeOptions| {
        options.control.tenants.default.code = Some(12_345);
    };
    drop(client);
    let client = world.start_with(quota).await;
    let account = client.get("/2016-08-19/account-settings").await.ok(200);
    assert_eq!(account["AccountLimit"]["TotalCodeSize"], 12_345);
    let signing = "/2020-06-30/functions/f/code-signing-config";
    assert_eq!(client.get(signing).await.ok(200), json!({ "FunctionName": "f" }));
    let absent = client.get("/2020-06-30/functions/h/code-signing-config").await;
    absent.refused(404, "ResourceNotFoundException");
}
