use std::error::Error;

use super::{ErrorChain, MAX_LENGTH, error_chain};

fn chain(texts: &[&str]) -> ErrorChain {
    let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
    texts.try_into().unwrap()
}

#[test]
fn causes_follow_the_error() {
    let chain = chain(&["cannot open pool", "cannot read", "no such file"]);
    assert_eq!(chain.to_string(), "cannot open pool");
    assert_eq!(chain.source().unwrap().to_string(), "cannot read");
    assert_eq!(error_chain(&chain), "cannot open pool: cannot read: no such file");
    assert_eq!(ErrorChain::of(&chain), chain);
    assert_eq!(error_chain(&ErrorChain::new("alone")), "alone");
}

#[test]
fn a_chain_is_serialised_as_a_list_of_texts() {
    let chain = chain(&["outer", "inner"]);
    let json = serde_json::to_string(&chain).unwrap();
    assert_eq!(json, r#"["outer","inner"]"#);
    assert_eq!(serde_json::from_str::<ErrorChain>(&json).unwrap(), chain);
    assert!(serde_json::from_str::<ErrorChain>("[]").is_err());
}

#[test]
fn the_length_of_a_chain_is_bounded() {
    let chain = chain(&vec!["again"; 100_000]);
    assert_eq!(Vec::from(chain).len(), MAX_LENGTH);
}
