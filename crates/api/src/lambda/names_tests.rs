use proptest::prelude::{any, proptest};

use super::*;

fn parse(named: &str, qualifier: Option<&str>) -> Result<Target, ParseNameError> {
    let scope = Scope { region: "us-east-1".into(), account: "000000000000".into() };
    super::parse(named, qualifier, &scope)
}

fn target(name: &str, qualifier: Option<&str>) -> Result<Target, ParseNameError> {
    Ok(Target::new(name, qualifier).unwrap())
}

#[test]
fn all_forms_of_a_name_are_read() {
    let whole = "arn:aws:lambda:us-east-1:000000000000:function:f";
    for named in ["f", "function:f", "000000000000:function:f", whole] {
        assert_eq!(parse(named, None), target("f", None), "{named}");
        assert_eq!(parse(named, Some("3")), target("f", Some("3")), "{named}");
        let qualified = format!("{named}:live");
        assert_eq!(parse(&qualified, None), target("f", Some("live")), "{named}");
        assert_eq!(parse(&qualified, Some("x")), Err(ParseNameError::Mismatch), "{named}");
    }
    assert_eq!(parse("f:$LATEST", None), target("f", Some("$LATEST")));
}

#[test]
fn invalid_names_are_refused() {
    let long = "x".repeat(65);
    let others = [
        "",
        "a b",
        "a/b",
        "../a",
        "f\u{e9}",
        ":1",
        "arn:aws:s3:us-east-1:000000000000:function:f",
        "arn:aws-cn:lambda:us-east-1:000000000000:function:f",
        "arn:aws:lambda:us-east-1:0:function:f",
        "arn:aws:lambda:us-east-1:function:f",
        "arn:aws:lambda:us-east-1:000000000000:layer:f",
        "arn:",
        "1:function:f",
        &long,
    ];
    for named in others {
        assert_eq!(parse(named, None), Err(ParseNameError::Function(named.into())), "{named}");
    }
    for qualifier in ["", "$latest", "a b", "a:b"] {
        let expected = Err(ParseNameError::Qualifier(qualifier.into()));
        assert_eq!(parse("f", Some(qualifier)), expected, "{qualifier}");
    }
}

#[test]
fn functions_of_other_regions_and_accounts_are_refused() {
    let region = ParseNameError::Region { region: "eu-west-1".into(), own: "us-east-1".into() };
    let text = "Functions from 'eu-west-1' are not reachable in this region ('us-east-1')";
    assert_eq!(region.to_string(), text);
    let named = "arn:aws:lambda:eu-west-1:000000000000:function:f:live";
    assert_eq!(parse(named, None), Err(region));
    let account =
        ParseNameError::Account { account: "000000000001".into(), own: "000000000000".into() };
    for named in ["arn:aws:lambda:us-east-1:000000000001:function:f", "000000000001:function:f"] {
        assert_eq!(parse(named, None), Err(account.clone()), "{named}");
    }
}

proptest! {
    #[test]
    fn a_parsed_name_is_plain(named in any::<String>(), qualifier in any::<Option<String>>()) {
        if let Ok(target) = parse(&named, qualifier.as_deref()) {
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            assert!((1..=64).contains(&target.name().len()) && target.name().chars().all(plain));
        }
    }
}
