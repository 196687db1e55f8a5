use std::convert::Infallible;

use super::{Name, NameError, NamePattern};

/// A name of a message, from its labels.
fn labels(labels: &[&str]) -> Name {
    let labels = labels.iter().map(|label| Ok::<_, Infallible>(label.as_bytes()));
    Name::of_labels(labels).unwrap()
}

fn matches(pattern: &str, name: &[&str]) -> bool {
    NamePattern::parse(pattern).unwrap().matches(&labels(name))
}

#[test]
fn a_pattern_matches_one_name_or_all_below_it() {
    for pattern in ["api.example.com", "API.Example.COM.", "api.example.com."] {
        assert!(matches(pattern, &["api", "EXAMPLE", "com"]), "{pattern}");
        assert!(!matches(pattern, &["example", "com"]), "{pattern}");
        assert!(!matches(pattern, &["x", "api", "example", "com"]), "{pattern}");
    }
    for (name, expected) in [
        (&["api", "example", "com"][..], true),
        (&["a", "b", "example", "com"], true),
        (&["example", "com"], false),
        (&["badexample", "com"], false),
        (&["com"], false),
        (&["example", "com", "evil"], false),
    ] {
        assert_eq!(matches("*.Example.com", name), expected, "{name:?}");
    }
}

/// Labels may have any byte. One with a dot, or with what looks like the next label, is another.
#[test]
fn labels_keep_their_boundaries() {
    assert!(!matches("api.example.com", &["api.example", "com"]));
    assert!(!matches("api.example.com", &["api\u{7}example", "com"]));
    assert!(!matches("*.example.com", &["x.example", "com"]));
    assert!(!matches("*.example.com", &["x\u{7}example", "com"]));
}

#[test]
fn a_name_of_a_message_is_bounded() {
    let name = |count: usize, len: usize| {
        let label = "a".repeat(len);
        Name::of_labels((0..count).map(|_| Ok::<_, Infallible>(label.as_bytes())))
    };
    assert!(name(3, 63).is_some() && name(127, 1).is_some());
    assert!(name(4, 63).is_none() && name(128, 1).is_none());
    assert!(name(1, 64).is_none() && name(1, 0).is_none());
    assert!(Name::of_labels([Ok(&b"a"[..]), Err(())].into_iter()).is_none());
}

#[test]
fn a_text_that_is_no_name_is_refused_with_the_reason() {
    let long = format!("{}com", "abcdefg.".repeat(32));
    for (text, expected) in [
        ("b\u{fc}cher.example", NameError::NotAscii),
        ("*", NameError::Star),
        ("*.", NameError::Label),
        ("a.*.com", NameError::Star),
        ("*a.com", NameError::Star),
        ("*.*.com", NameError::Star),
        ("a..com", NameError::Label),
        (".com", NameError::Label),
        ("-a.com", NameError::Label),
        ("a-.com", NameError::Label),
        ("a.com..", NameError::Label),
        ("a b.com", NameError::Character),
        ("a@b.com", NameError::Character),
        ("all", NameError::OneLabel),
        ("all.", NameError::OneLabel),
        (&format!("{}.com", "a".repeat(64)), NameError::Label),
        (&long, NameError::Length),
    ] {
        assert_eq!(NamePattern::parse(text).unwrap_err(), expected, "{text}");
    }
    for text in ["xn--bcher-kva.example", "_x._tcp.a-b.c0m", "*.internal"] {
        NamePattern::parse(text).unwrap();
    }
}
