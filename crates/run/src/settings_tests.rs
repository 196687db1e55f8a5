use std::path::PathBuf;

use super::{FunctionSettings, ImageName};

#[test]
fn all_settings_are_optional() {
    assert_eq!(FunctionSettings::parse("").unwrap(), FunctionSettings::default());
}

#[test]
fn all_settings_are_parsed() {
    let text = "image = \"learning\"\nmemory_mib = 1024\nvcpus = 2\nsource = \"a paper\"\nfiles_of = [\"../image\"]\n\
        [tolerance]\nprobability = 0.001\n";
    let read = FunctionSettings::parse(text).unwrap();
    assert_eq!(read.image.unwrap().as_str(), "learning");
    assert_eq!((read.memory_mib, read.vcpus), (Some(1024), Some(2)));
    assert_eq!(read.source.as_deref(), Some("a paper"));
    assert_eq!(read.files_of, [PathBuf::from("../image")]);
    assert_eq!(read.tolerance["probability"], 0.001);
}

#[test]
fn unknown_settings_and_invalid_values_are_refused_with_the_reason() {
    for (text, word) in [
        ("image = \"base\"\nmemory = \"1G\"", "memory"),
        ("image = \"../root\"", "cannot name an image"),
        ("vcpus = 300", "vcpus"),
        ("image", "line 1"),
    ] {
        let error = FunctionSettings::parse(text).unwrap_err().to_string();
        assert!(error.contains(word), "{text}: {error}");
    }
}

#[test]
fn an_image_name_cannot_name_a_path_outside_the_image_folder() {
    let name = |text: &str| ImageName::try_from(text.to_owned());
    assert_eq!(name("base"), Ok(ImageName::base()));
    assert!(name("my-image-2").is_ok() && name("python3.13").is_ok());
    for bad in ["", ".", "..", "a/b", "/", "A", ".a", "-a", "a\0", &"a".repeat(65)] {
        assert!(name(bad).is_err(), "{bad:?}");
    }
}
