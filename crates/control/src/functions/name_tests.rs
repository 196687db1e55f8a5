use proptest::prelude::{any, proptest};

use super::*;

#[test]
fn an_alias_is_not_a_number() {
    assert!(is_alias("live") && is_alias("v1") && is_alias("1a"));
    assert!(!is_alias("1") && !is_alias("") && !is_alias("$LATEST") && !is_alias("a b"));
}

#[test]
fn names_and_qualifiers_are_checked() {
    let target = Target::new("f", Some(LATEST)).unwrap();
    assert_eq!((target.name(), target.qualifier()), ("f", Some(LATEST)));
    let long = "x".repeat(65);
    for name in ["", "a b", "a/b", "../a", "f\u{e9}", &long] {
        assert_eq!(Target::new(name, None), Err(NameError::Function(name.into())), "{name}");
    }
    for qualifier in ["", "$latest", "a b", "a:b"] {
        let expected = Err(NameError::Qualifier(qualifier.into()));
        assert_eq!(Target::new("f", Some(qualifier)), expected, "{qualifier}");
    }
}

proptest! {
    #[test]
    fn a_valid_target_has_a_plain_name(name in any::<String>(), qualifier in any::<Option<String>>()) {
        if let Ok(target) = Target::new(&name, qualifier.as_deref()) {
            assert!(is_word(target.name(), MAX_NAME));
        }
    }
}
