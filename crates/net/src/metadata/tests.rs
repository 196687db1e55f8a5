use super::*;

#[test]
fn addresses_are_link_local() {
    let is_valid = |text: &str| MetadataConfig::is_valid_address(text.parse().unwrap());
    for valid in ["169.254.169.254", "169.254.1.0", "169.254.254.255", "169.254.170.2"] {
        assert!(is_valid(valid), "{valid}");
    }
    for invalid in ["169.254.0.1", "169.254.255.1", "10.0.0.1", "100.64.0.1", "0.0.0.0"] {
        assert!(!is_valid(invalid), "{invalid}");
    }
}
