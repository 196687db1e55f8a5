use super::Seq;

#[test]
fn numbers_are_compared_across_their_wrap() {
    let before = Seq(u32::MAX - 1);
    let after = before + 5;
    assert_eq!(after, Seq(3));
    assert_eq!((after.since(before), before.since(after)), (5, -5));
    assert_eq!((after.bytes_since(before), before.bytes_since(after)), (5, 0));
    assert!(before.is_before(after) && !after.is_before(before) && !after.is_before(after));
    assert_eq!((before.latest(after), after.latest(before)), (after, after));
}
