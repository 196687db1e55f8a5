use super::*;

#[test]
fn identities_have_no_common_value() {
    let (one, other) = (Identity::fresh().unwrap(), Identity::fresh().unwrap());
    assert_ne!(one.generation, other.generation);
    assert_ne!(one.instance_id, other.instance_id);
    assert_ne!(one.entropy, other.entropy);
}

#[test]
fn an_identity_does_not_print_its_entropy() {
    let identity = Identity { entropy: [171; ENTROPY_BYTES], ..Identity::fresh().unwrap() };
    let text = format!("{identity:?}");
    assert!(text.contains(&identity.instance_id), "{text}");
    assert!(!text.contains("171"), "{text}");
}
