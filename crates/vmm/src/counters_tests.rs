use super::*;

#[test]
fn times_are_added() {
    let ms = |ms| Timed::once(Duration::from_millis(ms));
    let mut all = Timed::default();
    all += Timed::default();
    assert_eq!(all, Timed::default());
    all += ms(5);
    assert_eq!(all, ms(5));
    all += Timed::default();
    all += ms(7);
    all += ms(2);
    let [shortest, longest, sum] = [2, 7, 14].map(Duration::from_millis);
    assert_eq!(all, Timed { count: 3, shortest, longest, sum });
}
