use super::*;

#[test]
fn a_second_of_work_comes_at_once_and_the_rest_at_the_rate() {
    let begin = Instant::now();
    let mut bucket = Bucket::new(1000, begin);
    assert_eq!(bucket.fill(begin), Duration::ZERO);
    bucket.left -= 1000;
    assert_eq!(bucket.fill(begin), Duration::from_millis(1));
    // Too much: the next one waits for it.
    bucket.left -= 500;
    assert_eq!(bucket.fill(begin), Duration::from_millis(501));
    assert_eq!(bucket.fill(begin + Duration::from_millis(400)), Duration::from_millis(101));
    assert_eq!(bucket.fill(begin + Duration::from_millis(501)), Duration::ZERO);
    // However long it rests.
    bucket.fill(begin + Duration::from_secs(3600));
    assert_eq!(bucket.left, 1000);
}

#[test]
fn frequent_questions_lose_no_time() {
    let begin = Instant::now();
    let mut bucket = Bucket::new(1, begin);
    bucket.left = 0;
    for tenth in 1..=100 {
        bucket.fill(begin + Duration::from_millis(100 * tenth));
        if bucket.left > 0 {
            bucket.left -= 1;
        }
    }
    assert_eq!(bucket.left, 0);
    // Ten seconds gave ten.
    assert_eq!(bucket.filled, begin + Duration::from_secs(10));
}

#[test]
fn both_limits_hold() {
    let limit = RateLimit { bytes: Some(100), operations: Some(2) };
    let mut limiter = RateLimiter::new(limit).unwrap();
    assert!(limiter.allows());
    limiter.take(1);
    limiter.take(1);
    assert!(!limiter.allows(), "operations");
    let mut limiter = RateLimiter::new(limit).unwrap();
    limiter.take(101);
    assert!(!limiter.allows(), "bytes");
}
