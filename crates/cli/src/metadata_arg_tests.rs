use firn_base::error_chain;
use serde_json::json;

use super::*;

fn parsed(text: &str) -> MetadataArg {
    text.parse().unwrap()
}

#[test]
fn a_file_and_its_options_are_read() {
    let config = MetadataConfig::default();
    assert_eq!(parsed("m.json"), MetadataArg { file: "m.json".into(), config });
    let config = MetadataConfig {
        version: MetadataVersion::V2,
        address: Ipv4Addr::new(169, 254, 170, 2),
        ..config
    };
    let expected = MetadataArg { file: "a/m.json".into(), config };
    assert_eq!(parsed("a/m.json,version=2,address=169.254.170.2"), expected);
}

#[test]
fn what_is_wrong_is_named() {
    let cases = [
        ("", "there is no file"),
        (",version=2", "there is no file"),
        ("m,version", "\"version\" is not an option"),
        ("m,mac=1", "\"mac=1\" is not an option"),
        ("m,version=1,version=2", "version is given twice"),
        ("m,version=3", "\"3\" is not a version"),
        ("m,address=10.0.0.1", "\"10.0.0.1\" is not an address"),
        ("m,address=169.254.0.1", "is not an address"),
        ("m,address=fe80::1", "is not an address"),
    ];
    for (text, reason) in cases {
        let error = text.parse::<MetadataArg>().unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn a_document_is_checked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.json");
    let argument = parsed(path.to_str().unwrap());
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        argument.read().map_err(|error| error_chain(&error))
    };
    let error = argument.read().unwrap_err().to_string();
    assert!(error.contains("cannot read the metadata in /"), "{error}");
    assert_eq!(read("{\"a\": 1}").unwrap().document, json!({"a": 1}));
    assert!(read("{").unwrap_err().contains("m.json is not JSON: EOF"));
    assert!(read("[]").unwrap_err().contains("is not a JSON object"));
    assert!(read(&"x".repeat(2 << 20)).unwrap_err().contains("is larger than 1048576 bytes"));
    let large = json!({"a": "x".repeat(60_000)}).to_string();
    let error = read(&large).unwrap_err();
    assert!(error.contains("cannot be stored: the metadata has 60008 bytes"), "{error}");
    // Spaces do not count.
    let spaced = format!("{{{}}}", " ".repeat(60_000));
    assert_eq!(read(&spaced).unwrap().document, json!({}));
}
