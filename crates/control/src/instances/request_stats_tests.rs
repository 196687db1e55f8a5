use super::*;

#[test]
fn percentiles_use_the_nearest_rank() {
    let of = |ns: Vec<u64>| latency(ns).map(|latency| (latency.p50_ns, latency.p99_ns));
    assert_eq!(of(Vec::new()), None);
    assert_eq!(of(vec![7]), Some((7, 7)));
    assert_eq!(of(vec![3, 1, 2]), Some((2, 3)));
    assert_eq!(of((1..=200).rev().collect()), Some((100, 198)));
}
