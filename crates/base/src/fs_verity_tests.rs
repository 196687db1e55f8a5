use super::*;

#[test]
fn an_invalid_argument_is_an_error_except_where_the_tree_does_not_fit() {
    let file = tempfile::tempfile().unwrap();
    assert!(!is_unsupported(Errno::INVAL) && fits(&file).unwrap());
    assert!(is_unsupported(Errno::NOTTY) && is_unsupported(Errno::OPNOTSUPP));
    // procfs has blocks of 1024 bytes.
    assert!(!fits(&File::open("/proc/version").unwrap()).unwrap());
}
