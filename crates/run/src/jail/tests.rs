use super::*;

#[test]
fn modes_are_read_as_they_are_written() {
    for mode in [JailMode::Auto, JailMode::Require, JailMode::Off] {
        assert_eq!(mode.to_string().parse::<JailMode>().unwrap(), mode);
    }
    assert!("on".parse::<JailMode>().unwrap_err().to_string().contains("\"on\" is not auto"));
}

#[test]
fn a_jail_that_is_off_has_no_walls() {
    assert_eq!(enter(JailMode::Off, None).unwrap(), None);
    assert!(Jail::new(JailMode::Off).shared().is_none());
}
