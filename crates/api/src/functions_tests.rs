//! Functions, their versions, aliases and images.

use firn_control::MAX_ZIP;

use super::*;
use crate::lambda::MAX_BODY;

#[tokio::test]
async fn a_function_is_created_found_and_deleted() {
    let world = World::new();
    let client = world.start().await;
    let more = json!({
        "Timeout": 30, "MemorySize": 512, "Description": "d",
        "Environment": { "Variables": { "KEY": "v" } },
        "SnapStart": { "ApplyOn": "PublishedVersions" },
    });
    let created = client.create("f", &more).await.ok(201);
    let expected = json!({
        "FunctionName": "f", "Runtime": "python3.11", "Handler": "handler.handler", "Version": "$LATEST",
        "FunctionArn": "arn:aws:lambda:eu-north-1:123456789012:function:f", "State": "Active", "Timeout": 30,
        "MemorySize": 512, "Description": "d", "PackageType": "Zip",
        "SnapStart": { "ApplyOn": "PublishedVersions", "OptimizationStatus": "Off" },
        "Environment": { "Variables": { "KEY": "v" } },
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&created[name], value, "{name}");
    }
    let name = "arn:aws:lambda:eu-north-1:123456789012:function:f";
    for path in [ONE.to_owned(), format!("/2015-03-31/functions/{}", name.replace(':', "%3A"))] {
        assert_eq!(client.get(&path).await.ok(200)["Configuration"], created);
        assert_eq!(client.get(&format!("{path}/configuration")).await.ok(200), created);
    }
    let again = client.create("f", &json!({})).await;
    assert!(again.refused(409, "ResourceConflictException").contains("already exist"));
    assert_eq!(world.files("code"), 1);

    client.ask("DELETE", ONE, &Value::Null).await.ok(204);
    assert_eq!(world.files("code"), 0);
    for (method, rest) in
        [("GET", ""), ("DELETE", ""), ("GET", "/configuration"), ("GET", "/versions")]
    {
        let gone = client.ask(method, &format!("{ONE}{rest}"), &Value::Null).await;
        assert!(gone.refused(404, "ResourceNotFoundException").contains(name));
    }
}

#[tokio::test]
async fn requests_that_lambda_refuses_are_refused() {
    let world = World::new();
    let client = world.start().await;
    let (value, rule) = ("InvalidParameterValueException", "ValidationException");
    let cases = [
        (json!({ "FunctionName": "a b" }), rule, "functionName"),
        (json!({ "FunctionName": "x".repeat(65) }), rule, "functionName"),
        (json!({ "Runtime": "python2.7" }), value, "python3.11"),
        (json!({ "Runtime": "python3.12" }), value, "python3.13"),
        (json!({ "Runtime": "ruby3.4" }), value, "Container images"),
        (
            json!({ "Runtime": "nodejs20.x", "SnapStart": { "ApplyOn": "PublishedVersions" } }),
            value,
            "nodejs20.x is not supported for SnapStart enabled functions.",
        ),
        (json!({ "Runtime": null }), rule, "runtime"),
        (json!({ "Handler": "a b" }), rule, "handler"),
        (json!({ "Role": "" }), rule, "role"),
        (json!({ "Role": "any" }), rule, "role"),
        (json!({ "Role": "arn:any" }), rule, "arn:(aws[a-zA-Z-]*)?:iam::\\d{12}:role/"),
        (json!({ "Role": "arn:aws:iam::1:role/r" }), rule, "role"),
        (json!({ "Role": "arn:aws:iam::123456789012:user/r" }), rule, "role"),
        (json!({ "Role": "arn:aws:iam::123456789012:role/" }), rule, "role"),
        (json!({ "Role": "arn:aws:iam::123456789012:role/r s" }), rule, "role"),
        (json!({ "Role": "arn:ibm:iam::123456789012:role/r" }), rule, "role"),
        (json!({ "Timeout": 901 }), rule, "timeout"),
        (json!({ "MemorySize": 127 }), rule, "memorySize"),
        (json!({ "Layers": ["l"] }), rule, "layers"),
        (json!({ "EphemeralStorage": { "Size": 511 } }), rule, "ephemeralStorage.size"),
        (json!({ "EphemeralStorage": { "Size": 10241 } }), rule, "ephemeralStorage.size"),
        (json!({ "Tags": { "aws:a": "b" } }), value, "the tag \"aws:a\" is not valid"),
        (json!({ "TracingConfig": { "Mode": "Active" } }), value, "TracingConfig: there is no X"),
        (json!({ "VpcConfig": { "SubnetIds": ["s"] } }), value, "VpcConfig: functions have no"),
        (json!({ "VpcConfig": { "Ipv6AllowedForDualStack": true } }), value, "VpcConfig: "),
        (json!({ "LoggingConfig": { "LogFormat": "JSON" } }), value, "LoggingConfig: logs are te"),
        (json!({ "DeadLetterConfig": { "TargetArn": "a" } }), value, "DeadLetterConfig: "),
        (json!({ "KMSKeyArn": "a" }), value, "KMSKeyArn: "),
        (json!({ "FileSystemConfigs": [{ "Arn": "a" }] }), value, "FileSystemConfigs: "),
        (json!({ "DurableConfig": { "ExecutionTimeout": 1 } }), value, "DurableConfig: this daemo"),
        (json!({ "PublishTo": "LATEST_PUBLISHED" }), value, "PublishTo: "),
        (json!({ "Code": { "ZipFile": "", "SourceKMSKeyArn": "a" } }), value, "SourceKMSKeyArn: "),
        (json!({ "Architectures": ["arm64"] }), value, "x86_64"),
        (json!({ "PackageType": "Image" }), value, "zip"),
        (json!({ "SnapStart": { "ApplyOn": "All" } }), rule, "snapStart"),
        (json!({ "Environment": { "Variables": { "AWS_REGION": "x" } } }), value, "reserved"),
        (json!({ "Environment": { "Variables": { "a b": "x" } } }), rule, "environment"),
        (json!({ "Environment": { "Variables": { "KEY": "x".repeat(4094) } } }), value, "4096"),
        (
            json!({ "Environment": { "Variables": { "FIRN_PLANNER": "none" } } }),
            value,
            "FIRN_PLANNER",
        ),
        (json!({ "Environment": { "Variables": { "FIRN_IMAGE": "../x" } } }), value, "FIRN_IMAGE"),
        (json!({ "Environment": { "Variables": { "FIRN_NETWORK": "x" } } }), value, "FIRN_NETWORK"),
        (
            json!({ "Environment": { "Variables": { "FIRN_RESTORE_HOOK": "yes" } } }),
            value,
            "FIRN_RESTORE_HOOK",
        ),
        (json!({ "Code": {} }), value, "source"),
        (json!({ "Code": { "S3Bucket": "b" } }), value, "ZipFile"),
        (json!({ "Code": { "ZipFile": STANDARD.encode("no zip") } }), value, "unzip"),
        (json!({ "Code": { "ZipFile": "%" } }), "InvalidRequestContentException", "ZipFile"),
        (json!({ "Code": 1 }), "InvalidRequestContentException", "parse"),
    ];
    for (more, kind, word) in cases {
        let message = client.create("f", &more).await.refused(400, kind);
        assert!(message.contains(word), "{more}: {message}");
    }
    let broken = client.send(HttpRequest::post("/2015-03-31/functions"), "{").await;
    broken.refused(400, "InvalidRequestContentException");
    assert_eq!(client.get("/2015-03-31/functions/").await.ok(200)["Functions"], json!([]));
    assert_eq!(world.files("code"), 0);
    for path in ["/", "/2015-03-31/functions/f/nothing", "/2015-03-31/event-source-mappings/"] {
        client.get(path).await.refused(404, "UnknownOperationException");
    }
}

#[tokio::test]
async fn settings_that_change_nothing_are_accepted() {
    let world = World::new();
    let client = world.start().await;
    let more = json!({
        "EphemeralStorage": { "Size": 512 }, "TracingConfig": { "Mode": "PassThrough" }, "Tags": {},
        "LoggingConfig": { "LogFormat": "Text" }, "Layers": [], "Architectures": ["x86_64"],
        "VpcConfig": { "SubnetIds": [], "SecurityGroupIds": [], "Ipv6AllowedForDualStack": false },
        "DeadLetterConfig": { "TargetArn": "" }, "KMSKeyArn": "", "PackageType": "Zip",
        "FileSystemConfigs": null,
    });
    let created = client.create("f", &more).await.ok(201);
    assert_eq!(created["EphemeralStorage"], json!({ "Size": 512 }));
    for (path, method, document) in [
        ("configuration", "PUT", json!({ "KMSKeyArn": "a" })),
        ("configuration", "PUT", json!({ "Tags": { "a": "b" } })),
        ("code", "PUT", json!({ "ZipFile": "", "Architectures": ["arm64"] })),
        ("code", "PUT", json!({ "S3Bucket": "b", "S3Key": "k" })),
        ("versions", "POST", json!({ "PublishTo": "LATEST_PUBLISHED" })),
    ] {
        let path = format!("{ONE}/{path}");
        let refused = client.ask(method, &path, &document).await;
        let message = refused.refused(400, "InvalidParameterValueException");
        let name = document.as_object().unwrap().keys().find(|name| message.starts_with(*name));
        assert!(name.is_some(), "{document}: {message}");
    }
    let configuration = client.get(&format!("{ONE}/configuration")).await.ok(200);
    assert_eq!(configuration["RevisionId"], created["RevisionId"]);
    let code = json!({ "ZipFile": code_of("x = 2")["ZipFile"], "Architectures": ["x86_64"] });
    client.ask("PUT", &format!("{ONE}/code"), &code).await.ok(200);
    for (name, value, kind) in [
        ("x-amz-log-type", "All", "ValidationException"),
        ("x-amz-tenant-id", "t", "InvalidParameterValueException"),
        ("x-amz-durable-execution-name", "d", "InvalidParameterValueException"),
    ] {
        let request = HttpRequest::post(format!("{ONE}/invocations")).header(name, value);
        client.send(request, "{}").await.refused(400, kind);
    }
}

#[tokio::test]
async fn code_over_the_limit_is_refused() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    let zip = STANDARD.encode(vec![0; MAX_ZIP + 1]);
    let code = format!("{ONE}/code");
    let long = [
        client.create("g", &json!({ "Code": { "ZipFile": &zip } })).await,
        client.ask("PUT", &code, &json!({ "ZipFile": &zip })).await,
    ];
    for long in long {
        let told = long.refused(400, "InvalidParameterValueException");
        assert_eq!(told, "Zipped size must be smaller than 52428800 bytes");
    }
    let requests = [HttpRequest::post("/2015-03-31/functions"), HttpRequest::put(&code)];
    for (request, operation) in requests.into_iter().zip(["CreateFunction", "UpdateFunctionCode"]) {
        let longer = client.send(request, vec![b' '; MAX_BODY + 1]).await;
        let told = longer.refused(413, "RequestEntityTooLargeException");
        assert!(told.contains(operation), "{told}");
    }
    assert_eq!(world.files("code"), 1);
}

#[tokio::test]
async fn a_version_is_published_if_something_changed() {
    let world = World::new();
    let client = world.start().await;
    let created = client.created("f").await;
    let versions = format!("{ONE}/versions");
    let first = client.ask("POST", &versions, &Value::Null).await.ok(201);
    assert_eq!((&first["Version"], &first["State"]), (&json!("1"), &json!("Active")));
    assert_eq!(first["FunctionArn"], "arn:aws:lambda:eu-north-1:123456789012:function:f:1");
    let same = client.ask("POST", &versions, &json!({ "Description": "x" })).await.ok(201);
    assert_eq!(same["RevisionId"], first["RevisionId"]);

    let wrong = client.ask("POST", &versions, &json!({ "CodeSha256": "x" })).await;
    wrong.refused(400, "InvalidParameterValueException");
    let wrong = client.ask("POST", &versions, &json!({ "RevisionId": "x" })).await;
    wrong.refused(412, "PreconditionFailedException");

    let code = format!("{ONE}/code");
    let mut update = code_of("x = 2");
    update["RevisionId"] = json!("x");
    client.ask("PUT", &code, &update).await.refused(412, "PreconditionFailedException");
    update["RevisionId"] = created["RevisionId"].clone();
    let updated = client.ask("PUT", &code, &update).await.ok(200);
    assert_ne!(updated["CodeSha256"], created["CodeSha256"]);
    assert_eq!(world.files("code"), 2, "version 1 has the old code");
    let second = client.ask("POST", &versions, &json!({ "Description": "two" })).await.ok(201);
    assert_eq!((&second["Version"], &second["Description"]), (&json!("2"), &json!("two")));

    let listed = client.get(&versions).await.ok(200);
    let numbers: Vec<&Value> =
        listed["Versions"].as_array().unwrap().iter().map(|v| &v["Version"]).collect();
    assert_eq!(numbers, ["$LATEST", "1", "2"]);
    client.ask("DELETE", &format!("{ONE}?Qualifier=1"), &Value::Null).await.ok(204);
    assert_eq!(world.files("code"), 1);
    let gone = client.get(&format!("{ONE}?Qualifier=1")).await;
    gone.refused(404, "ResourceNotFoundException");
    let latest = client.ask("DELETE", &format!("{ONE}?Qualifier=$LATEST"), &Value::Null).await;
    latest.refused(400, "InvalidParameterValueException");
    client.invoke("f/invocations?Qualifier=3", "1").await.refused(404, "ResourceNotFoundException");

    let settings = [
        json!({ "Timeout": 7 }),
        json!({ "MemorySize": 256 }),
        json!({ "EphemeralStorage": { "Size": 1024 } }),
        json!({ "Environment": { "Variables": { "KEY": "value" } } }),
        json!({ "Handler": "another.handler" }),
        json!({ "Role": "arn:aws:iam::123456789012:role/another" }),
    ];
    for (number, setting) in (3..).zip(settings) {
        client.ask("PUT", &format!("{ONE}/configuration"), &setting).await.ok(200);
        let published = client.ask("POST", &versions, &Value::Null).await.ok(201);
        assert_eq!(published["Version"], json!(number.to_string()), "{setting}");
    }
}

#[tokio::test]
async fn a_version_that_cannot_be_frozen_reports_the_error() {
    let world = World::new();
    let client = world.start().await;
    let more = json!({ "SnapStart": { "ApplyOn": "PublishedVersions" }, "Publish": true });
    let created = client.create("f", &more).await.ok(201);
    assert_eq!((&created["Version"], &created["State"]), (&json!("1"), &json!("Pending")));
    let settled = client.settled("f", "1").await;
    assert_eq!(
        (&settled["State"], &settled["StateReasonCode"]),
        (&json!("Failed"), &json!("FunctionError"))
    );
    assert!(settled["StateReason"].as_str().unwrap().contains("did not start"), "{settled}");
    let refused = client.invoke("f:1/invocations", "1").await;
    assert!(refused.refused(400, "SnapStartException").contains("did not start"));
}

#[tokio::test]
async fn snapstart_of_a_provided_runtime_requires_a_restore_hook() {
    let world = World::new();
    let client = world.start().await;
    let more = |variables: Value| {
        json!({
            "Runtime": "provided.al2023", "Publish": true, "Environment": { "Variables": variables },
            "SnapStart": { "ApplyOn": "PublishedVersions" },
        })
    };
    let refused = client.create("f", &more(json!({}))).await;
    let text = refused.refused(400, "InvalidParameterValueException");
    assert!(text.contains("FIRN_RESTORE_HOOK=true"), "{text}");
    client
        .ask("GET", "/2015-03-31/functions/f", &Value::Null)
        .await
        .refused(404, "ResourceNotFoundException");
    client.create("g", &more(json!({ "FIRN_RESTORE_HOOK": "true" }))).await.ok(201);
}

#[tokio::test]
async fn aliases_name_versions() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    client.ask("POST", &format!("{ONE}/versions"), &Value::Null).await.ok(201);
    let aliases = format!("{ONE}/aliases");
    let live = json!({ "Name": "live", "FunctionVersion": "1" });
    let created = client.ask("POST", &aliases, &live).await.ok(201);
    assert_eq!(created["AliasArn"], "arn:aws:lambda:eu-north-1:123456789012:function:f:live");
    client.ask("POST", &aliases, &live).await.refused(409, "ResourceConflictException");
    let number = json!({ "Name": "12", "FunctionVersion": "1" });
    client.ask("POST", &aliases, &number).await.refused(400, "ValidationException");
    let missing = json!({ "Name": "m", "FunctionVersion": "9" });
    client.ask("POST", &aliases, &missing).await.refused(404, "ResourceNotFoundException");

    let one = format!("{aliases}/live");
    assert_eq!(client.get(&one).await.ok(200), created);
    let found = client.get(&format!("{ONE}/configuration?Qualifier=live")).await.ok(200);
    assert_eq!(found["Version"], "1");
    for version in ["1", "01"] {
        let path = format!("{ONE}?Qualifier={version}");
        let used = client.ask("DELETE", &path, &Value::Null).await;
        assert!(used.refused(409, "ResourceConflictException").contains("live"));
    }
    let update = json!({ "FunctionVersion": "$LATEST", "Description": "d" });
    let updated = client.ask("PUT", &one, &update).await.ok(200);
    assert_eq!(
        (&updated["FunctionVersion"], &updated["Description"]),
        (&json!("$LATEST"), &json!("d"))
    );
    let stale = json!({ "Description": "e", "RevisionId": created["RevisionId"] });
    client.ask("PUT", &one, &stale).await.refused(412, "PreconditionFailedException");
    assert_eq!(client.get(&aliases).await.ok(200)["Aliases"], json!([updated]));
    client.ask("DELETE", &one, &Value::Null).await.ok(204);
    client.get(&one).await.refused(404, "ResourceNotFoundException");
    client.invoke("f:live/invocations", "1").await.refused(404, "ResourceNotFoundException");
}

#[tokio::test]
async fn requests_that_cannot_be_served_report_the_error() {
    let world = World::new();
    let client = world.start().await;
    client.created("f").await;
    let path = "f/invocations";
    client.invoke("g/invocations", "1").await.refused(404, "ResourceNotFoundException");
    client.invoke(path, "{").await.refused(400, "InvalidRequestContentException");
    let long = " ".repeat(6 << 20) + "1";
    client.invoke(path, &long).await.refused(413, "RequestTooLargeException");
    let kind = |kind: &str| {
        HttpRequest::post(format!("{ONE}/invocations")).header("x-amz-invocation-type", kind)
    };
    client.send(kind("Later"), "1").await.refused(400, "InvalidParameterValueException");
    let context = kind("RequestResponse").header("x-amz-client-context", "%");
    client.send(context, "1").await.refused(400, "InvalidRequestContentException");
    client.send(kind("DryRun"), "1").await.ok(204);
    let accepted = client.send(kind("Event"), "1").await;
    assert_eq!(
        (accepted.status, &accepted.headers["x-amz-executed-version"]),
        (202, &"$LATEST".parse().unwrap())
    );
    // The program that runs microVMs fails.
    let failed = client.invoke(path, "").await;
    let report = failed.report();
    assert!(report["start_ns"].as_u64().unwrap() > 0, "{report}");
    assert!(report["total_ns"].as_u64() > report["start_ns"].as_u64(), "{report}");
    assert_eq!(report["start"], Value::Null, "{report}");
    assert_eq!(report["reason"], "no microVM started", "{report}");
    failed.refused(500, "ServiceException");
}

#[tokio::test]
async fn an_image_that_is_not_built_is_reported_to_the_client() {
    let world = World::new();
    let client = world.start().await;
    let on = |image: &str| json!({ "Environment": { "Variables": { "FIRN_IMAGE": image } } });
    let value = "InvalidParameterValueException";
    let told = client.create("f", &on("mine")).await.refused(400, value);
    assert!(told.contains("mine") && told.contains("firn image build"), "{told}");
    client.get(ONE).await.refused(404, "ResourceNotFoundException");
    assert_eq!(world.files("code"), 0);

    let image = world.directory.path().join("images/mine.erofs");
    std::fs::create_dir(image.parent().unwrap()).unwrap();
    std::fs::write(&image, "").unwrap();
    client.create("f", &on("mine")).await.ok(201);
    let configuration = format!("{ONE}/configuration");
    client.ask("PUT", &configuration, &on("other")).await.refused(400, value);
    // The program that runs microVMs fails, after the image was found.
    client.invoke("f/invocations", "1").await.refused(500, "ServiceException");

    std::fs::remove_file(&image).unwrap();
    let told = client.invoke("f/invocations", "1").await.refused(502, "InvalidRuntimeException");
    assert!(told.contains("mine") && told.contains("firn image build"), "{told}");
    client.ask("PUT", &configuration, &json!({ "Timeout": 9 })).await.ok(200);
    client.ask("PUT", &configuration, &on("base")).await.ok(200);
    client.invoke("f/invocations", "1").await.refused(500, "ServiceException");
}

#[tokio::test]
async fn a_runtime_runs_on_the_image_of_its_name() {
    let world = World::new();
    let client = world.start().await;
    let images = world.directory.path().join("images");
    std::fs::create_dir(&images).unwrap();
    client.create("old", &json!({ "Runtime": "python3.11" })).await.ok(201);
    let value = "InvalidParameterValueException";
    for runtime in ["python3.13", "nodejs20.x", "java21"] {
        let on = json!({ "Runtime": runtime });
        let told = client.create("f", &on).await.refused(400, value);
        assert!(told.contains(&format!("`firn image build {runtime}`")), "{told}");
        let configuration = "/2015-03-31/functions/old/configuration";
        let told = client.ask("PUT", configuration, &on).await.refused(400, value);
        assert!(told.contains(&format!("`firn image build {runtime}`")), "{told}");
        let own = json!({
            "Runtime": runtime, "Environment": { "Variables": { "FIRN_IMAGE": "base" } },
        });
        client.create(&format!("own-{}", &runtime[..4]), &own).await.ok(201);

        std::fs::write(images.join(format!("{runtime}.erofs")), "").unwrap();
        let created = client.create(&runtime[..4], &on).await.ok(201);
        assert_eq!(created["Runtime"], runtime);
    }
}

#[tokio::test]
async fn a_version_without_its_image_is_not_frozen() {
    let world = World::new();
    let client = world.start().await;
    let image = world.directory.path().join("images/mine.erofs");
    std::fs::create_dir(image.parent().unwrap()).unwrap();
    std::fs::write(&image, "").unwrap();
    let more = json!({
        "Environment": { "Variables": { "FIRN_IMAGE": "mine" } },
        "SnapStart": { "ApplyOn": "PublishedVersions" },
    });
    client.create("f", &more).await.ok(201);
    std::fs::remove_file(&image).unwrap();
    client.ask("POST", &format!("{ONE}/versions"), &Value::Null).await.ok(201);
    let settled = client.settled("f", "1").await;
    assert!(settled["StateReason"].as_str().unwrap().contains("firn image build"), "{settled}");
}
