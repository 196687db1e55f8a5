use super::Sample;

#[test]
fn truncated_samples_are_refused() {
    let mut body = 77u64.to_ne_bytes().to_vec();
    body.extend(4u32.to_ne_bytes());
    body.extend([0x63, 0x06, 1, 2]);
    let sample = Sample::parse(&body).unwrap();
    assert_eq!((sample.time, sample.tracepoint, sample.record), (77, 1635, &[0x63, 6, 1, 2][..]));
    for len in 0..body.len() {
        assert!(Sample::parse(&body[..len]).is_none(), "{len}");
    }
}
