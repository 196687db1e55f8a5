use super::{Compression, is_kernel, payload};

fn image(content: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 0x400 + 16];
    image[0x1f1] = 1;
    image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&u32::try_from(content.len()).unwrap().to_le_bytes());
    image.extend(content);
    image.extend(b"after");
    image
}

#[test]
fn a_payload_is_found_by_the_header() {
    let zstd = image(b"\x28\xb5\x2f\xfdzstdSIZE");
    let found = payload(&zstd).unwrap();
    assert_eq!(
        (found.compression, found.bytes),
        (Compression::Zstd, b"\x28\xb5\x2f\xfdzstd".as_slice())
    );
    let xz = image(b"\xfd7zXxzSIZE");
    let found = payload(&xz).unwrap();
    assert_eq!((found.compression, found.bytes), (Compression::Xz, b"\xfd7zXxz".as_slice()));
    let gzip = image(b"\x1f\x8bgzipSIZE");
    let found = payload(&gzip).unwrap();
    assert_eq!(
        (found.compression, found.bytes),
        (Compression::Gzip, b"\x1f\x8bgzipSIZE".as_slice())
    );
}

#[test]
fn a_damaged_image_has_no_payload() {
    assert!(payload(&image(b"unknown")).is_none());
    assert!(payload(&[0; 16]).is_none());
    let zstd = image(b"\x28\xb5\x2f\xfdzstdSIZE");
    assert!(payload(&zstd[..0x400 + 20]).is_none());
}

#[test]
fn only_the_package_with_the_image_is_unpacked() {
    assert!(is_kernel("linux-image-6.12.9+bpo-cloud-amd64"));
    assert!(!is_kernel("linux-image-cloud-amd64") && !is_kernel("linux-base"));
}
