use proptest::prelude::*;

use super::*;

#[test]
fn a_second_of_work_comes_at_once_and_the_rest_at_the_rate() {
    let begin = Instant::now();
    let mut bucket = Bucket::new(TokenBucket::per_second(1000), begin);
    assert_eq!(bucket.fill(begin), Duration::ZERO);
    bucket.take(1000);
    assert_eq!(bucket.fill(begin), Duration::from_millis(1));
    // Too much: the next one waits for it.
    bucket.take(500);
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
    let mut bucket = Bucket::new(TokenBucket::per_second(1), begin);
    bucket.left = 0;
    for tenth in 1..=100 {
        bucket.fill(begin + Duration::from_millis(100 * tenth));
        if bucket.left > 0 {
            bucket.take(1);
        }
    }
    assert_eq!(bucket.left, 0);
    // Ten seconds gave ten.
    assert_eq!(bucket.filled, begin + Duration::from_secs(10));
}

#[test]
fn a_burst_comes_once_and_the_size_comes_again() {
    let begin = Instant::now();
    let limit = TokenBucket { size: 10, burst: 5, refill: Duration::from_millis(100) };
    let mut bucket = Bucket::new(limit, begin);
    bucket.take(15);
    assert_eq!(bucket.fill(begin), Duration::from_millis(10));
    let later = begin + Duration::from_secs(10);
    assert_eq!(bucket.fill(later), Duration::ZERO);
    bucket.take(10);
    assert_eq!(bucket.fill(later), Duration::from_millis(10));
}

#[test]
fn both_limits_hold() {
    let (bytes, operations) = (TokenBucket::per_second(100), TokenBucket::per_second(2));
    let limit = RateLimit { bytes: Some(bytes), operations: Some(operations) };
    let mut limiter = RateLimiter::new(limit).unwrap();
    assert!(limiter.allows());
    limiter.take(1);
    limiter.take(1);
    assert!(!limiter.allows(), "operations");
    let mut limiter = RateLimiter::new(limit).unwrap();
    limiter.take(101);
    assert!(!limiter.allows(), "bytes");
    limiter.set(RateLimit::default());
    assert!(limiter.allows());
}

proptest! {
    /// Whatever a client sets, the bucket gives something after the time that it names.
    #[test]
    fn any_bucket_gives_something_in_the_end(
        (size, burst, refill) in (any::<u64>(), any::<u64>(), any::<u64>()),
        taken in any::<u64>(),
    ) {
        let begin = Instant::now();
        let limit = TokenBucket { size, burst, refill: Duration::from_nanos(refill) };
        let mut bucket = Bucket::new(limit, begin);
        bucket.take(taken);
        let wait = bucket.fill(begin);
        prop_assume!(wait < Duration::from_secs(1 << 32));
        prop_assert_eq!(bucket.fill(begin + wait), Duration::ZERO);
    }
}
