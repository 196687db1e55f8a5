use super::*;

#[test]
fn a_cell_is_filled_once_and_not_by_a_failure() {
    let cell = OnceLock::new();
    assert_eq!(get_or_try_init(&cell, || Err::<u8, _>("no")), Err("no"));
    assert_eq!(get_or_try_init(&cell, || Ok::<_, &str>(1)), Ok(&1));
    assert_eq!(get_or_try_init(&cell, || Err("later")), Ok(&1));
    assert_eq!(get_or_try_init(&cell, || Ok::<_, &str>(2)), Ok(&1));
}
