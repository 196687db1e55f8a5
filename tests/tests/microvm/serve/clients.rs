//! boto3 and the aws command, with `awslambdaric` in the guest. Meanwhile the tests check the
//! daemon's status, metrics and traces.

use std::os::unix::fs::symlink;
use std::path::Path;

use firn_tests::{Collector, Daemon, HELLO, World, shell, zip_of};
use memchr::memmem;
use serde_json::{Value, json};

use super::{adds_up, finished};

const ROLE: &str = "arn:aws:iam::000000000000:role/any";
const KEY: &str = "AKIDOFTHEFUNCTIONSROLE";

/// Has the keys of its role before its snapshot, as AWS's SDKs fetch them, in its hook after a
/// restore, and for each request.
const HOLDER: &str = "\
import json
import os
import urllib.request

from snapshot_restore_py import register_after_restore


def secret():
    request = urllib.request.Request(os.environ['AWS_CONTAINER_CREDENTIALS_FULL_URI'])
    request.add_header('Authorization', os.environ['AWS_CONTAINER_AUTHORIZATION_TOKEN'])
    return json.loads(urllib.request.urlopen(request).read())['SecretAccessKey']


seen = [secret()]
register_after_restore(lambda: seen.append(secret()))


def handler(event, context):
    return [event, *seen, secret()]
";

const PAGE: &str = include_str!("../../../../docs/start/serve.md");

/// The commands of the page in order.
#[test]
fn the_start_page_reaches_its_answers() {
    let world = World::default();
    let function = HELLO.write(&world.file("guest/functions"));
    std::fs::write(function.join("input-a.json"), HELLO.input_a).unwrap();
    // The daemon's state is in a cache of the test's own.
    let cache = world.file("cache");
    std::fs::create_dir(&cache).unwrap();
    symlink(firn_tests::cache(), cache.join("guest")).unwrap();
    let blocks = PAGE.split("```").filter_map(|block| block.strip_prefix("sh\n"));
    let commands = blocks.collect::<String>();
    let script = format!("{commands}kill $!\nwait $!\n");
    let mut shell = shell(&world, &script);
    let output = shell.env("FIRN_CACHE", &cache).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    let answers = stdout.matches(HELLO.expected_a.trim()).count();
    assert_eq!(answers, 2, "{stdout}{stderr}");
    let starts = ["cold", "thawed"].map(|start| stderr.matches(start).count());
    assert!(starts.iter().all(|count| *count > 0), "{stderr}");
}

const BOTO: &str = include_str!("../../../clients/boto.py");

#[test]
#[ignore = "long: make test-full"]
fn boto3_and_the_aws_command_work_unmodified() {
    const INVOCATIONS: u64 = 30;
    let world = World::default();
    let collector = Collector::start();
    let otlp = collector.endpoint();
    let roles = world.file("roles");
    let keys =
        format!("[{ROLE}]\naws_access_key_id = {KEY}\naws_secret_access_key = {KEY}-secret\n");
    std::fs::write(&roles, keys).unwrap();
    let roles = roles.display().to_string();
    let guests = ["--monitors", "3", "--event-pause", "1", "--role-credentials", &roles];
    let options = [&guests[..], &["--otlp", &otlp]].concat();
    let daemon = Daemon::start_guarded(&world, &options);
    let unsigned = daemon.ask("GET", "/2015-03-31/functions/", &Value::Null);
    assert_eq!(unsigned.status, 403, "{unsigned:?}");
    let script = world.file("boto.py");
    std::fs::write(&script, BOTO).unwrap();
    let (script, count) = (script.display().to_string(), INVOCATIONS.to_string());
    let boto = daemon.python(&[&script, &daemon.endpoint(), &count, "16"]);
    aws(&world, &daemon);
    watch(&world, &daemon);
    let delete = ["-m", "awscli", "lambda", "delete-function", "--function-name", "by-aws"];
    finished(daemon.python(&delete));
    let text = finished(boto);
    let seen: Value = serde_json::from_str(&text).unwrap();

    assert_eq!(seen["taken"], "ResourceConflictException");
    assert_eq!(seen["wrong secret"], "InvalidSignatureException");
    assert_eq!(seen["unknown key"], "UnrecognizedClientException");
    assert_eq!(seen["published"], json!(["1", "Pending"]));
    assert_eq!(seen["early"], "SnapStartNotReadyException");
    let first = &seen["first"];
    assert_eq!(first["report"]["start"], "thawed", "{first}");
    assert_eq!(first["body"]["greeting"], "Hello, Ada!");
    assert_eq!(
        first["body"]["hooks"],
        json!(["before", "after"]),
        "hooks run once, before the first request"
    );
    assert_eq!(first["body"]["version"], "1");
    let arn = "arn:aws:lambda:us-east-1:000000000000:function:greeter:live";
    assert_eq!(first["body"]["arn"], arn);
    // The disk of a boot grows, and that of a thaw is as large.
    for invoked in [first, &seen["second"]] {
        assert_eq!(invoked["body"]["layers"], json!(["second", "packaged", "one"]), "{invoked}");
        let tmp = invoked["body"]["tmp"].as_u64().unwrap() >> 20;
        assert!((1024..1100).contains(&tmp), "{invoked}");
    }
    assert!((1..=10_000).contains(&first["body"]["left"].as_u64().unwrap()), "{first}");
    assert!(first["log"].as_str().unwrap().contains("\nasked for Ada\nEND RequestId"), "{first}");
    let (date, rest) = first["body"]["stream"].as_str().unwrap().split_once("/[1]").unwrap();
    assert!(date.starts_with("20") && date.len() == 10 && rest.len() == 32, "{first}");
    reported(first, &["Billed Duration", "Restore Duration", "Billed Restore Duration"]);
    assert_eq!(first["report"]["standby"], true, "{first}");
    assert!(first["report"]["thaw"]["times"]["process_start_ns"].is_u64(), "{first}");
    for count in ["faults", "private_bytes", "shared_bytes"] {
        assert!(first["report"]["taken"][count].as_u64().unwrap() > 0, "{count}: {first}");
    }
    let raised = &seen["raised"];
    assert_eq!(
        (&raised["error"], &raised["body"]["errorType"]),
        (&json!("Unhandled"), &json!("KeyError"))
    );
    let slow = &seen["slow"];
    assert_eq!(
        (&slow["error"], &slow["body"]["errorType"]),
        (&json!("Unhandled"), &json!("Sandbox.Timedout"))
    );
    assert_eq!(slow["report"]["start"], "warm", "{slow}");
    assert!(slow["log"].as_str().unwrap().contains(" Task timed out after 10.00 seconds\n"));
    reported(slow, &["Billed Duration"]);
    let next = &seen["next"];
    assert_eq!(next["report"]["start"], "thawed", "the time-out ended the microVM: {next}");
    assert_eq!(next["body"]["count"], 1, "{next}");
    assert_eq!((&seen["dry"]["status"], &seen["event"]["status"]), (&json!(204), &json!(202)));
    assert_eq!(seen["attempts"], json!([1, 2, 3]), "a failed event is retried twice");
    let ended: Vec<_> = ["Success", "RetriesExhausted"]
        .iter()
        .map(|condition| {
            let records = seen["records"].as_array().unwrap();
            let found =
                records.iter().find(|record| record["requestContext"]["condition"] == *condition);
            found.unwrap_or_else(|| panic!("{condition}: {records:?}"))
        })
        .collect();
    assert_eq!(seen["provisioned"]["Status"], "READY", "{}", seen["provisioned"]);
    assert_eq!(seen["provisioned"]["AllocatedProvisionedConcurrentExecutions"], 1);
    assert_eq!(seen["initialised"], "provisioned-concurrency");
    assert_eq!(ended[0]["requestPayload"], json!({ "name": "Cy" }));
    assert_eq!(ended[0]["responsePayload"]["greeting"], "Hi, Cy?");
    assert_eq!(ended[1]["requestContext"]["functionArn"], arn);
    assert_eq!(ended[1]["requestContext"]["approximateInvokeCount"], 3);
    assert_eq!(ended[1]["responseContext"]["functionError"], "Unhandled");
    assert_eq!(ended[1]["responsePayload"]["errorType"], "RuntimeError");
    assert_eq!(seen["once"], json!([1, 2, 3, 4]), "and as often as its settings say");
    assert_eq!(seen["url"], json!([201, true, "/a/path"]));
    for all in ["right", "randoms", "requests"] {
        assert_eq!(seen[all], INVOCATIONS, "{all}");
    }
    assert_eq!(seen["hooks"], json!([["before", "after"]]));
    let thaws = seen["thaws"].as_array().unwrap();
    // More than one microVM for each place, because the other function takes places for a while.
    assert!(thaws.iter().all(|thaw| thaw["count"] == 1) && thaws.len() < 10, "{thaws:?}");
    assert_eq!(seen["unknown"], "ResourceNotFoundException");
    assert_eq!(seen["updated"], true);
    let second = &seen["second"];
    assert_eq!(
        (&second["report"]["start"], &second["body"]["greeting"]),
        (&json!("cold"), &json!("Hi, Ada?"))
    );
    assert_eq!(second["body"]["hooks"], json!([]), "hooks run only with SnapStart");
    reported(second, &["Billed Duration", "Init Duration"]);
    let streamed = &seen["streamed"];
    assert_eq!(
        (&streamed["body"]["greeting"], &streamed["complete"]),
        (&json!("Hi, Di?"), &json!({}))
    );
    reported(streamed, &["Billed Duration"]);
    // A thaw, a warm microVM, and a boot.
    for invoked in [first, raised, second] {
        adds_up(&invoked["report"]);
    }
    assert!(second["report"]["boot"]["times"]["boot_ns"].as_u64().unwrap() > 0, "{second}");
    let faults = |report: &Value| report["taken"]["faults"].as_u64().unwrap();
    let (booted, raised) = (faults(&second["report"]), faults(&raised["report"]));
    assert!(
        raised < booted,
        "a warm microVM reports only the faults of one request: {raised}, {booted}"
    );
    assert_eq!(seen["throttled"], "TooManyRequestsException");
    assert_eq!(seen["versions"], json!(["$LATEST", "1", "2"]));
    assert_eq!(
        (&seen["functions"], &seen["gone"]),
        (&json!(true), &json!("ResourceNotFoundException"))
    );

    daemon.end();
    let spans = collector.spans();
    let named = |name: &str| spans.iter().filter(|span| span.name == name).count();
    let all = usize::try_from(INVOCATIONS).unwrap();
    assert!(named("invoke greeter") > all, "{}", named("invoke greeter"));
    assert!(named("resume") > 0 && named("identify") > 0 && named("queue") > all);
    assert!(named("boot") > 0 && named("load") > named("resume"), "cold starts have more parts");
    for folder in ["code", "snapshots"] {
        let left = std::fs::read_dir(world.file("daemon").join(folder)).unwrap().count();
        assert_eq!(left, 0, "files of deleted functions remain in {folder}");
    }
}

/// Fails unless the last line of the log has these times, and the memory of a Python process.
#[track_caller]
fn reported(invoked: &Value, times: &[&str]) {
    let log = invoked["log"].as_str().unwrap();
    let line = log.lines().last().unwrap();
    assert!(line.starts_with("REPORT RequestId: "), "{log}");
    let number = |name: &str| {
        let (_, rest) = line.split_once(&format!("\t{name}: ")).unwrap();
        rest.split(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert!(times.iter().all(|name| number(name) > 0.0), "{log}");
    assert_eq!(number("Memory Size"), 128.0);
    assert!((5.0..=150.0).contains(&number("Max Memory Used")), "{log}");
    let starts = ["Restore", "Init"].iter().filter(|start| line.contains(**start)).count();
    assert_eq!(starts, usize::from(times.len() > 1), "{log}");
}

/// Whether a file in the folder contains the text.
#[track_caller]
fn holds(folder: &Path, text: &str) -> bool {
    let mut files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.any(|file| memmem::find(&std::fs::read(file).unwrap(), text.as_bytes()).is_some())
}

/// Checks the output of `firn top`.
#[track_caller]
fn watch(world: &World, daemon: &Daemon) {
    let credentials = world.credentials();
    let top = |format: &str, credentials: &[&str]| {
        let top = world.firn(["top", "--once", format, "--endpoint", &daemon.endpoint()]);
        top.args(credentials).run()
    };
    let signed = ["--credentials", &credentials.display().to_string()];
    let json = top("--json", &signed).json();
    assert_eq!(json["monitors"]["limit"], 3, "{json}");
    let named = json["versions"].as_array().unwrap().iter().find(|v| v["function"] == "by-aws");
    assert_eq!(named.unwrap()["thawed"], 1, "{json}");
    let table = top("--interval=1", &signed);
    let text = table.ok();
    assert!(text.contains("by-aws") && text.contains("standby monitors"), "{text}");
    top("--interval=1", &[]).refused(&["403", "--credentials"]);
}

/// One function, with the aws command only.
#[track_caller]
fn aws(world: &World, daemon: &Daemon) {
    let zip = |name: &str, source: &str| {
        let file = world.file(name);
        std::fs::write(&file, zip_of("handler.py", source)).unwrap();
        format!("fileb://{}", file.display())
    };
    let (event, answer) = (world.file("event.json"), world.file("answer.json"));
    std::fs::write(&event, "{\"a\": [1]}").unwrap();
    let event = format!("fileb://{}", event.display());
    let lambda = |operation: &[&str], arguments: &[&str]| {
        let words = [&["-m", "awscli", "lambda"], operation, &["--function-name", "by-aws"]];
        let output = finished(daemon.python(&[&words.concat(), arguments].concat()));
        serde_json::from_str::<Value>(&output).unwrap_or_default()
    };
    let code = zip("code.zip", HOLDER);
    let created = lambda(
        &["create-function"],
        &[
            ["--runtime", "python3.11", "--handler", "handler.handler"],
            ["--role", ROLE, "--zip-file", &code],
            ["--snap-start", "ApplyOn=PublishedVersions", "--timeout", "60"],
        ]
        .concat(),
    );
    assert_eq!(created["FunctionName"], "by-aws");
    let published = lambda(&["publish-version"], &[]);
    assert_eq!((&published["Version"], &published["State"]), (&json!("1"), &json!("Pending")));
    lambda(&["wait", "published-version-active"], &["--qualifier", "1"]);
    let snapshots = world.file("daemon/snapshots");
    let mut entries = std::fs::read_dir(&snapshots).unwrap().map(|entry| entry.unwrap().path());
    let snapshot = entries.find(|path| path.to_string_lossy().contains("/by-aws-1-"));
    let snapshot = snapshot.unwrap();
    assert!(holds(&snapshot, "EXPIRED"), "what the function got before its snapshot");
    assert!(!holds(&snapshot, KEY), "the snapshot has the keys of the role");
    let to = answer.display().to_string();
    let invoked = lambda(&["invoke"], &["--qualifier", "1", "--payload", &event, &to]);
    assert_eq!(invoked["ExecutedVersion"], "1", "{invoked}");
    let secret = format!("{KEY}-secret");
    let expected = json!([{"a": [1]}, "EXPIRED", secret, secret]);
    let answered = std::fs::read_to_string(&answer).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&answered).unwrap(), expected);
    let changed = zip("changed.zip", "def handler(event, context): return 'changed'");
    let updated = lambda(&["update-function-code"], &["--zip-file", &changed]);
    assert_ne!(updated["CodeSha256"], created["CodeSha256"]);
}
