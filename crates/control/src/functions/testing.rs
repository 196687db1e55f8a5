//! A version for tests.

use serde_json::json;
use uuid::Uuid;

use super::Version;

/// The published version 3 of a function, as an earlier daemon stored it.
pub(crate) fn version() -> Version {
    let version = json!({
        "function": "f", "version": "3", "revision": Uuid::nil(), "last_modified": "",
        "code": { "sha256": "", "size": 0 }, "runtime": "python3.11", "handler": "h.h", "role": "r",
        "description": "", "timeout": 3, "memory": 128, "environment": {}, "snap_start": true,
        "state": "Active", "snapshot": null,
    });
    serde_json::from_value(version).unwrap()
}
