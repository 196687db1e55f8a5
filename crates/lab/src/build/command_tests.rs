use std::process::Command;

use super::{BuildError, Runner, require};

#[test]
fn missing_programs_are_named() {
    require(&["sh", "true"]).unwrap();
    let error = require(&["sh", "no-such-program"]).unwrap_err();
    assert!(error.to_string().contains("cannot find no-such-program:"), "{error}");
}

#[test]
fn output_and_pipes_return_what_programs_write() {
    let mut runner = Runner::new().unwrap();
    assert_eq!(runner.output(Command::new("echo").arg("text")).unwrap(), "text\n");
    let mut check = Command::new("sh");
    check.args(["-c", "read text && test \"$text\" = 'a b'"]);
    runner.pipe(Command::new("echo").arg("a b"), &mut check).unwrap();
    assert!(runner.pipe(Command::new("echo").arg("c"), &mut check).is_err());
    assert!(runner.pipe(&mut Command::new("false"), &mut Command::new("true")).is_err());
}

#[test]
fn a_failure_names_the_program_and_the_hint() {
    let mut runner = Runner::new().unwrap();
    let error = runner.run(&mut Command::new("false"), "Check the network").unwrap_err();
    assert_eq!(
        error.to_string(),
        "false failed (exit status: 1); see its messages above. Check the network"
    );
    let error = runner.run(&mut Command::new("/no/such/program"), "").unwrap_err();
    assert!(matches!(error, BuildError::Start { .. }), "{error}");
}
