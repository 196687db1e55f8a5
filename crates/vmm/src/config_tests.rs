use super::{SizeError, check_sizes_on};

const HOST: u64 = 8 << 30;

#[test]
fn invalid_sizes_are_refused_with_the_reason() {
    assert_eq!(check_sizes_on(1, 0, HOST), Err(SizeError::NoMemory));
    assert_eq!(
        check_sizes_on(1, (128 << 20) + 1, HOST),
        Err(SizeError::Unaligned((128 << 20) + 1))
    );
    assert_eq!(
        check_sizes_on(1, HOST + 4096, HOST),
        Err(SizeError::MoreThanHost { wanted: HOST + 4096, host: HOST })
    );
    for vcpus in [0, 33, 255] {
        assert_eq!(check_sizes_on(vcpus, 128 << 20, HOST), Err(SizeError::Vcpus(vcpus)));
    }
    for vcpus in 1..=32 {
        assert_eq!(check_sizes_on(vcpus, HOST, HOST), Ok(()));
    }
}
