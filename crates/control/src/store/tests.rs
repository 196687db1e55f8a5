use std::collections::BTreeMap;

use uuid::Uuid;

use super::*;
use crate::functions::{Attachments, Code, Runtime, VersionState};
use crate::service::Claim;

pub(super) fn version(function: &str, version: &str) -> Version {
    Version {
        function: function.into(),
        version: version.into(),
        revision: Uuid::new_v4(),
        last_modified: String::new(),
        code: Code { sha256: "00".into(), size: 1, unpacked: 0, content: 0 },
        layers: Vec::new(),
        runtime: Runtime::Python311,
        handler: "h.h".into(),
        role: String::new(),
        description: String::new(),
        timeout: 3,
        memory: 128,
        storage: 512,
        environment: BTreeMap::new(),
        snap_start: true,
        state: VersionState::Active,
        waiting: None,
        owner: None,
        snapshot: None,
    }
}

pub(super) fn open(data: &tempfile::TempDir) -> Store {
    Store::open(data.path(), false).unwrap()
}

pub(super) fn tagged(tag: &str) -> Attachments {
    let tags = BTreeMap::from([("tag".into(), tag.into())]);
    Attachments { tags, ..Attachments::default() }
}

pub(super) fn create(store: &Store, name: &str) {
    let function = FunctionRecord {
        id: Uuid::new_v4(),
        next_version: 3,
        concurrency: None,
        owner: None,
        latest: version(name, LATEST),
    };
    let alias = Alias {
        version: "1".into(),
        additional: None,
        description: String::new(),
        revision: Uuid::nil(),
    };
    store
        .change(|change| {
            change.put_function(name, &function)?;
            change.put_version(name, 1, &version(name, "1"))?;
            change.put_version(name, 2, &version(name, "2"))?;
            change.put_alias(name, "live", &alias)?;
            change.put_attachments(name, LATEST, &tagged(name))?;
            change.put_attachments(name, "live", &tagged("live"))
        })
        .unwrap();
}

#[test]
fn entries_persist_across_reopening() {
    let folder = tempfile::tempdir().unwrap();
    create(&open(&folder), "f");
    let store = open(&folder);
    assert_eq!(store.function("f").unwrap().unwrap().next_version, 3);
    assert_eq!(store.version("f", "2").unwrap().unwrap().version, "2");
    assert_eq!(store.version("f", LATEST).unwrap().unwrap().version, LATEST);
    assert_eq!(store.alias("f", "live").unwrap().unwrap().version, "1");
    assert_eq!(store.attachments("f", LATEST).unwrap(), tagged("f"));
    assert_eq!(store.attachments("f", "live").unwrap(), tagged("live"));
    assert_eq!(store.attachments("f", "1").unwrap(), Attachments::default());
    for missing in ["3", "x", "99999999999999999999"] {
        assert!(store.version("f", missing).unwrap().is_none(), "{missing}");
    }
}

#[test]
fn removing_a_function_removes_only_its_own_entries() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder);
    for name in ["a", "ab", "b"] {
        create(&store, name);
    }
    assert!(store.change(|change| change.remove_function("a")).unwrap());
    assert!(!store.change(|change| change.remove_function("a")).unwrap());
    assert!(store.function("a").unwrap().is_none());
    assert!(store.versions("a").unwrap().is_empty() && store.aliases("a").unwrap().is_empty());
    assert!(store.all_attachments("a").unwrap().is_empty());
    for name in ["ab", "b"] {
        assert_eq!(store.versions(name).unwrap().len(), 2);
        assert_eq!(store.aliases(name).unwrap().len(), 1);
        assert_eq!(store.all_attachments(name).unwrap().len(), 2);
    }
    assert_eq!(store.functions().unwrap().len(), 2);
}

#[test]
fn a_database_without_attachments_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder);
    create(&store, "f");
    // As an earlier version has left it.
    let deleted = store.change(|change| {
        change.touch("f");
        change.transaction.delete_table(attachments::ATTACHMENTS).map_err(failed)
    });
    assert!(deleted.unwrap());
    drop(store);
    let store = open(&folder);
    assert_eq!(store.attachments("f", LATEST).unwrap(), Attachments::default());
    assert!(store.all_attachments("f").unwrap().is_empty());
    store.change(|change| change.put_attachments("f", LATEST, &tagged("new"))).unwrap();
    assert_eq!(store.attachments("f", LATEST).unwrap(), tagged("new"));
}

#[test]
fn a_failed_transaction_has_no_effect() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder);
    create(&store, "f");
    let failed: Result<(), StoreError> = store.change(|change| {
        change.remove_function("f")?;
        Err(StoreError::Entry(serde_json::from_str::<u8>("x").unwrap_err()))
    });
    assert!(failed.is_err());
    assert!(store.function("f").unwrap().is_some());
}

#[test]
fn only_one_daemon_opens_a_database() {
    let folder = tempfile::tempdir().unwrap();
    let held = open(&folder);
    let error = Store::open(folder.path(), false).unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error:?}");
    // As by a process that a killed daemon has just forked.
    let forked = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(held);
    });
    open(&folder);
    forked.join().unwrap();
}

#[test]
fn at_most_a_limit_of_answers_is_kept_until_they_expire() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder);
    let claim = |signature: &str, now, until| store.claim(signature, now, until, 2).unwrap();
    assert_eq!(claim("a", 100, 200), Claim::First);
    assert_eq!(claim("b", 100, 300), Claim::First);
    store.answer("a", b"done").unwrap();
    assert_eq!(claim("c", 199, 400), Claim::Full);
    // A refused claim takes nothing, and removes nothing that is still kept.
    assert_eq!(claim("a", 199, 400), Claim::Answered(b"done".to_vec()));
    assert_eq!(claim("b", 199, 400), Claim::Unanswered);
    assert_eq!(claim("c", 200, 400), Claim::First);
    assert_eq!(claim("d", 200, 400), Claim::Full);
    drop(store);
    // The time until which an answer is kept is stored with it.
    let store = open(&folder);
    assert_eq!(store.claim("d", 299, 400, 2).unwrap(), Claim::Full);
    assert_eq!(store.claim("d", 300, 400, 2).unwrap(), Claim::First);
    assert_eq!(store.claim("c", 300, 400, 2).unwrap(), Claim::Unanswered);
}
