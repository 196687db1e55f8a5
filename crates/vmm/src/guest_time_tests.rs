use super::{Sample, offset};

const FORMAT: &str = "\
name: kvm_exit
ID: 1635
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;

\tfield:unsigned int exit_reason;\toffset:8;\tsize:4;\tsigned:0;
\tfield:unsigned long guest_rip;\toffset:16;\tsize:8;\tsigned:0;

print fmt: \"vcpu %u rip 0x%lx\", REC->vcpu_id, REC->guest_rip
";

#[test]
fn fields_are_found_by_name_and_size() {
    assert_eq!(offset(FORMAT, "guest_rip"), Some(16));
    assert_eq!(offset(FORMAT, "exit_reason"), None);
    assert_eq!(offset(FORMAT, "rip"), None);
}

#[test]
fn samples_that_are_cut_short_are_refused() {
    let mut body = 77u64.to_ne_bytes().to_vec();
    body.extend(4u32.to_ne_bytes());
    body.extend([0x63, 0x06, 1, 2]);
    let sample = Sample::read(&body).unwrap();
    assert_eq!((sample.time, sample.tracepoint, sample.raw), (77, 1635, &[0x63, 6, 1, 2][..]));
    for len in 0..body.len() {
        assert!(Sample::read(&body[..len]).is_none(), "{len}");
    }
}
