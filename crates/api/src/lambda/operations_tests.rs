use std::collections::BTreeMap;
use std::fs::File;

use axum::http::Request as HttpRequest;
use flate2::read::GzDecoder;
use serde_json::Value;

use super::*;
use crate::tests::{World, clients};

const PAGE: &str = include_str!("../../../../docs/reference/serve.md");

/// The operations in the page's table, and whether they are supported.
fn documented() -> BTreeMap<&'static str, bool> {
    let (_, section) = PAGE.split_once("\n## The API\n").unwrap();
    let (section, _) = section.split_once("\n### ").unwrap();
    let mut found = BTreeMap::new();
    for line in section.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", names, support @ ("supported" | "refused"), ..] = cells[..] else { continue };
        for name in names.split(", ") {
            assert_eq!(found.insert(name, support == "supported"), None, "{name} is there twice");
        }
    }
    found
}

#[tokio::test]
async fn the_documented_operations_are_those_of_the_router() {
    let world = World::new();
    let client = world.start().await;
    let documented = documented();
    for (name, method, pattern) in OPERATIONS {
        let words = pattern.split('/').map(|word| if word.starts_with('{') { "f" } else { word });
        let path = words.collect::<Vec<_>>().join("/");
        let answer = client.send(HttpRequest::builder().method(method).uri(path), "").await;
        let unknown = answer.kind == "UnknownOperationException";
        assert_eq!(documented.get(name), Some(&!unknown), "{name}: {answer:?}");
        if unknown {
            let message = answer.refused(404, "UnknownOperationException");
            assert_eq!(message, format!("this daemon does not support the operation {name}"));
        }
    }
    assert_eq!(documented.len(), OPERATIONS.len());
    let foreign = client.get("/2015-03-31/functions/f/nothing").await;
    let message = foreign.refused(404, "UnknownOperationException");
    assert!(message.contains("GET /2015-03-31/functions/f/nothing"), "{message}");
}

/// Requires the part `clients`: botocore's service model of AWS Lambda.
#[test]
fn the_operations_are_those_of_the_service_model() {
    let Some(clients) = clients() else { return };
    let model = clients.join("botocore/data/lambda/2015-03-31/service-2.json.gz");
    let model: Value = serde_json::from_reader(GzDecoder::new(File::open(model).unwrap())).unwrap();
    let mut known = BTreeMap::new();
    for (name, operation) in model["operations"].as_object().unwrap() {
        let text = |key: &str| operation["http"][key].as_str().unwrap().trim_end_matches('/');
        known.insert(name.as_str(), (text("method"), text("requestUri")));
    }
    let plain = |pattern: &'static str| pattern.trim_end_matches('/');
    let here = OPERATIONS.map(|(name, method, pattern)| (name, (method, plain(pattern))));
    assert_eq!(known, BTreeMap::from(here));
}
