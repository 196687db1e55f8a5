use super::offset;

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
