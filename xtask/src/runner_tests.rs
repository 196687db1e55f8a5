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
fn a_step_is_run_again_after_one_exit_code_a_few_times() {
    let runner = Runner::new(false, String::new());
    let folder = tempfile::tempdir().unwrap();
    let runs = folder.path().join("runs");
    let run = |code| {
        let script = format!("echo >> {0}; test $(wc -l < {0}) = 6 || exit {code}", runs.display());
        let result = runner.run(&shell(&script).again_after(9));
        (result.is_ok(), std::fs::read(&runs).unwrap().len())
    };
    assert_eq!(run(9), (false, 3));
    assert_eq!(run(8), (false, 4));
    assert_eq!(run(9), (true, 6));
}

#[test]
fn all_steps_have_to_succeed() {
    let runner = Runner::new(false, "kvm".to_owned());
    let (good, bad) = (shell("test \"$FIRN_REQUIRE\" = kvm"), shell("exit 1"));
    runner.run_beside(&good, &[good.clone(), good.clone()]).unwrap();
    assert!(runner.run_beside(&bad, std::slice::from_ref(&good)).is_err());
    let error = runner.run_beside(&good, &[bad, shell("exit 2")]).unwrap_err().to_string();
    assert_eq!(error, "failed (exit status: 1): sh -c 'exit 1'");
}

#[test]
fn a_dry_run_lists_steps_and_runs_none() {
    let runner = Runner::new(true, String::new());
    runner.run(&shell("exit 1")).unwrap();
    runner.run_beside(&Step::words("a b"), &[Step::words("c d"), Step::new("e")]).unwrap();
    assert_eq!(runner.listed(), ["sh -c 'exit 1'", "c d &", "e &", "a b"]);
}
