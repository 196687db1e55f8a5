use proptest::prelude::*;
use serde_json::json;

use super::*;

/// The examples of RFC 7396, appendix A.
#[test]
fn patches_merge_as_in_the_standard() {
    let examples = [
        (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
        (json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"})),
        (json!({"a": "b"}), json!({"a": null}), json!({})),
        (json!({"a": "b", "b": "c"}), json!({"a": null}), json!({"b": "c"})),
        (json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"})),
        (json!({"a": "c"}), json!({"a": ["b"]}), json!({"a": ["b"]})),
        (json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}})),
        (json!({"a": [{"b": "c"}]}), json!({"a": [1]}), json!({"a": [1]})),
        (json!(["a", "b"]), json!(["c", "d"]), json!(["c", "d"])),
        (json!({"a": "b"}), json!(["c"]), json!(["c"])),
        (json!({"a": "foo"}), json!(null), json!(null)),
        (json!({"a": "foo"}), json!("bar"), json!("bar")),
        (json!({"e": null}), json!({"a": 1}), json!({"e": null, "a": 1})),
        (json!([1, 2]), json!({"a": "b", "c": null}), json!({"a": "b"})),
        (json!({}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}})),
    ];
    for (document, patch, merged) in examples {
        let store = MetadataStore::default();
        store.put(document).unwrap();
        store.patch(patch).unwrap();
        assert_eq!(store.document(), merged);
    }
}

#[test]
fn a_document_that_is_too_large_changes_nothing() {
    let store = MetadataStore::with_limit(11);
    assert_eq!(store.document(), Value::Null);
    assert_eq!(store.patch(json!({})), Err(PatchMetadataError::Empty));
    store.put(json!({"a": "234"})).unwrap();
    // One byte more.
    let too_large = PutMetadataError::TooLarge { bytes: 12, limit: 11 };
    assert_eq!(store.put(json!({"a": "2345"})), Err(too_large));
    assert_eq!(store.patch(json!({"a": "2345"})), Err(PatchMetadataError::Put(too_large)));
    assert_eq!(store.document(), json!({"a": "234"}));
    // A copy is the same document.
    store.clone().put(json!(1)).unwrap();
    assert_eq!(store.document(), json!(1));
}

proptest! {
    /// A patch of a document by another one, without nulls, has all of the patch.
    #[test]
    fn what_a_patch_has_is_there(
        before in proptest::collection::btree_map("[a-c]", "[x-z]{0,3}", 0..4),
        patch in proptest::collection::btree_map("[a-c]", "[x-z]{0,3}", 0..4),
    ) {
        let store = MetadataStore::default();
        store.put(json!(before)).unwrap();
        store.patch(json!(patch)).unwrap();
        let mut expected = before;
        expected.extend(patch);
        prop_assert_eq!(store.document(), json!(expected));
    }
}
