use serde_json::json;

use super::super::testing::{new_function, options};
use super::*;
use crate::functions::EventSettings;

const ARN: &str = "arn:aws:lambda:eu-north-1:123456789012:function:";

fn invocation(function: &str) -> Invocation {
    let invocation = Invocation::new(r#"{"a": 1.50}"#, Duration::from_secs(1)).unwrap();
    invocation.with_function_arn(Some(format!("{ARN}{function}")))
}

#[test]
fn a_record_is_that_of_aws_lambda() {
    let response = |failed, payload: &str| {
        Some(Response { version: "3".into(), failed, payload: payload.into() })
    };
    let record_of = |target: Target, ended: &Ended| {
        let invocation = invocation("f");
        let text = record(&target, &invocation, ended).unwrap();
        assert!(text.contains(r#""requestPayload":{"a": 1.50}"#), "{text}");
        let mut record: Value = serde_json::from_str(&text).unwrap();
        let time = record["timestamp"].take();
        assert!(
            time.as_str().is_some_and(|time| time.len() == 24 && time.ends_with('Z')),
            "{time}"
        );
        let id = record["requestContext"]["requestId"].take();
        assert_eq!(id, invocation.request_id());
        record
    };
    let latest = Target::new("f", None).unwrap();
    let failed = Ended {
        condition: Condition::RetriesExhausted,
        attempts: 3,
        response: response(true, r#"{"errorMessage":"x"}"#),
    };
    let expected = json!({
        "version": "1.0", "timestamp": null,
        "requestContext": {
            "requestId": null, "functionArn": format!("{ARN}f:$LATEST"),
            "condition": "RetriesExhausted", "approximateInvokeCount": 3,
        },
        "requestPayload": { "a": 1.5 },
        "responseContext": { "statusCode": 200, "executedVersion": "3", "functionError": "Unhandled" },
        "responsePayload": { "errorMessage": "x" },
    });
    assert_eq!(record_of(latest, &failed), expected);
    let alias = Target::new("f", Some("live")).unwrap();
    let served =
        Ended { condition: Condition::Success, attempts: 1, response: response(false, "[2]") };
    let record = record_of(alias, &served);
    assert_eq!(record["requestContext"]["condition"], "Success");
    assert_eq!(record["requestContext"]["functionArn"], format!("{ARN}f"));
    assert_eq!(record["responseContext"], json!({ "statusCode": 200, "executedVersion": "3" }));
    assert_eq!(record["responsePayload"], json!([2]));
}

#[test]
fn an_answer_that_is_not_json_is_a_string_in_a_record() {
    for (payload, expected) in [
        (&b"{\"a\": 1.50}"[..], "{\"a\": 1.50}"),
        (b"plain \"text\"", "\"plain \\\"text\\\"\""),
        (b"", "\"\""),
        (b"\xff1", "\"\u{fffd}1\""),
    ] {
        assert_eq!(json_of(payload.to_vec()), expected);
    }
}

/// No microVM starts here, so the events stay in their files.
#[tokio::test]
async fn a_destination_gets_an_event_and_a_loop_ends() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::open(&options(folder.path()), None).unwrap();
    for name in ["f", "g"] {
        control.create_function(new_function(name)).await.unwrap();
    }
    let [first, second] = ["f", "g"].map(|name| Target::new(name, None).unwrap());
    let destination = Destination { target: second.clone(), arn: format!("{ARN}g") };
    let ended = Ended { condition: Condition::EventAgeExceeded, attempts: 0, response: None };
    let events = || {
        let files = std::fs::read_dir(folder.path().join("data/events")).unwrap();
        let read = |path| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let events: Vec<Value> = files.map(|file| read(file.unwrap().path())).collect();
        events.into_iter().filter(|event| event["target"]["name"] == "g").collect::<Vec<_>>()
    };
    let event = control.events.accept(first.clone(), invocation("f")).await.unwrap();
    control.deliver(&event, None, &ended).await;
    assert!(events().is_empty());
    control.deliver(&event, Some(&destination), &ended).await;
    let found = events();
    let [next] = &found[..] else { panic!("{found:?}") };
    let record = &next["invocation"]["event"];
    assert_eq!(record["requestContext"]["condition"], "EventAgeExceeded");
    assert_eq!(record["requestContext"]["requestId"], event.request_id());
    assert_eq!((record.get("responseContext"), record.get("responsePayload")), (None, None));
    assert_eq!(next["invocation"]["function_arn"], format!("{ARN}g"));
    assert_eq!(next["hops"], 1);
    let last = control.events.accept_after(MAX_HOPS, first.clone(), invocation("f")).await.unwrap();
    control.deliver(&last, Some(&destination), &ended).await;
    assert_eq!(events().len(), 1);

    // An event that is too old goes to the destination of failures.
    let settings = EventSettings {
        max_age: Some(60),
        on_failure: Some(destination),
        ..EventSettings::default()
    };
    control.set_event_settings(&first, move |_| Some(settings)).await.unwrap();
    let old = event.aged(Duration::from_secs(61));
    assert!(control.serve_event(&old, &TraceContext::default()).await);
    assert_eq!(events().len(), 2);
}
