use super::Runner;
use crate::step::Step;

fn shell(script: &str) -> Step {
    Step::new("sh").args(["-c", script])
}

#[test]
fn a_step_gets_the_required_parts_and_its_exit_code_decides() {
    let runner = Runner::new(false, "kvm,disk".to_owned());
    runner.run(&shell("test \"$FIRN_REQUIRE\" = kvm,disk")).unwrap();
    let error = runner.run(&shell("exit 3")).unwrap_err().to_string();
    assert_eq!(error, "failed (exit status: 3): sh -c 'exit 3'");
    let error = runner.run(&Step::new("/no/such/program")).unwrap_err().to_string();
    assert!(error.starts_with("cannot run /no/such/program: "), "{error}");
}

#[test]
fn both_steps_have_to_succeed() {
    let runner = Runner::new(false, String::new());
    let (good, bad) = (shell("true"), shell("exit 1"));
    runner.run_both(&good, &good).unwrap();
    assert!(runner.run_both(&good, &bad).is_err());
    assert!(runner.run_both(&bad, &good).is_err());
}

#[test]
fn a_dry_run_lists_steps_and_runs_none() {
    let runner = Runner::new(true, String::new());
    runner.run(&shell("exit 1")).unwrap();
    runner.run_both(&Step::words("a b"), &Step::words("c d")).unwrap();
    assert_eq!(runner.listed(), ["sh -c 'exit 1'", "c d &", "a b"]);
}
