use proptest::prelude::{any, proptest};

use super::*;

fn target(name: &str, qualifier: Option<&str>) -> Result<Target, NameError> {
    let qualifier = qualifier.map(ToOwned::to_owned);
    Ok(Target { name: name.to_owned(), qualifier })
}

#[test]
fn every_way_to_name_a_function_is_read() {
    let whole = "arn:aws:lambda:us-east-1:000000000000:function:f";
    for named in ["f", "function:f", "000000000000:function:f", whole] {
        assert_eq!(Target::parse(named, None), target("f", None), "{named}");
        assert_eq!(Target::parse(named, Some("3")), target("f", Some("3")), "{named}");
        let qualified = format!("{named}:live");
        assert_eq!(Target::parse(&qualified, None), target("f", Some("live")), "{named}");
        assert_eq!(Target::parse(&qualified, Some("x")), Err(NameError::Mismatch), "{named}");
    }
    assert_eq!(Target::parse("f:$LATEST", None), target("f", Some("$LATEST")));
}

#[test]
fn what_is_no_name_is_refused() {
    let long = "x".repeat(65);
    let others = [
        "",
        "a b",
        "a/b",
        "../a",
        "f\u{e9}",
        ":1",
        "arn:aws:s3:r:1:function:f",
        "arn:",
        "1:function:f",
        &long,
    ];
    for named in others {
        assert_eq!(Target::parse(named, None), Err(NameError::Function(named.into())), "{named}");
    }
    for qualifier in ["", "$latest", "a b", "a:b"] {
        let expected = Err(NameError::Qualifier(qualifier.into()));
        assert_eq!(Target::parse("f", Some(qualifier)), expected, "{qualifier}");
    }
}

#[test]
fn aliases_are_no_numbers() {
    assert!(is_alias("live") && is_alias("v1") && is_alias("1a"));
    assert!(!is_alias("1") && !is_alias("") && !is_alias("$LATEST") && !is_alias("a b"));
}

proptest! {
    #[test]
    fn whatever_is_read_is_a_plain_name(named in any::<String>(), qualifier in any::<Option<String>>()) {
        if let Ok(target) = Target::parse(&named, qualifier.as_deref()) {
            assert!(is_word(&target.name, MAX_NAME));
        }
    }
}
