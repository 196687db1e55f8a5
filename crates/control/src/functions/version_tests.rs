use super::*;

#[test]
fn an_alias_gives_a_part_of_its_requests_to_another_version() {
    let alias = |part| Alias {
        version: "1".into(),
        additional: Some(("2".into(), part)),
        description: String::new(),
        revision: Uuid::nil(),
    };
    let draws = || (0..100).map(|draw| f64::from(draw) / 100.0);
    for (part, expected) in [(0.0, 0), (0.25, 25), (1.0, 100)] {
        let others = draws().filter(|draw| alias(part).into_version(*draw) == "2").count();
        assert_eq!(others, expected, "{part}");
    }
    assert!(alias(0.0).names("1") && alias(0.0).names("2") && !alias(0.0).names("3"));
}
