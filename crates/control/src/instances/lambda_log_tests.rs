use firn_run::{FunctionError, StartReport, StartTimes, Usage};

use super::*;
use crate::functions::testing::version;

fn answer(logs: &str) -> Result<Answer, Failed> {
    Ok(Answer {
        payload: b"1".to_vec(),
        duration: Duration::from_micros(2_150),
        logs: logs.to_owned(),
        max_memory: (34 << 20) + 1,
    })
}

fn failed(kind: &str, text: &str) -> Result<Answer, Failed> {
    let error = FunctionError {
        error_type: kind.to_owned(),
        error_message: text.to_owned(),
        ..FunctionError::default()
    };
    let usage = Usage { duration_ns: 3_004_000_000, max_memory_bytes: 9 << 20 };
    Err(Failed { usage: Some(Box::new(usage)), ..Failed::new(error, "out\n".to_owned()) })
}

fn log_of(outcome: &Result<Answer, Failed>, report: &InvocationReport) -> String {
    log(&version(), "r-1", outcome, report)
}

#[test]
fn a_warm_request_has_the_lines_of_aws_lambda() {
    let report = InvocationReport { start: Some(StartKind::warm), ..InvocationReport::default() };
    let expected = "START RequestId: r-1 Version: 3\nout\nEND RequestId: r-1\n\
                    REPORT RequestId: r-1\tDuration: 2.15 ms\tBilled Duration: 3 ms\t\
                    Memory Size: 128 MB\tMax Memory Used: 35 MB\t\n";
    assert_eq!(log_of(&answer("out"), &report), expected);
    assert_eq!(log_of(&answer("out\n"), &report), expected);
}

#[test]
fn a_cold_start_is_billed_with_its_initialisation() {
    let report = InvocationReport {
        start: Some(StartKind::cold),
        init_ns: Some(100_770_000),
        ..InvocationReport::default()
    };
    let log = log_of(&answer(""), &report);
    let end = "Billed Duration: 103 ms\tMemory Size: 128 MB\tMax Memory Used: 35 MB\tInit Duration: 100.77 ms\t\n";
    assert!(log.ends_with(end), "{log}");
}

#[test]
fn a_thaw_is_billed_with_the_steps_in_the_guest() {
    let times = StartTimes { identify_ns: Some(49_200_000), ..StartTimes::default() };
    let report = InvocationReport {
        start: Some(StartKind::thawed),
        start_ns: 601_340_000,
        thaw: Some(Box::new(StartReport { times, ..StartReport::default() })),
        ..InvocationReport::default()
    };
    let log = log_of(&answer(""), &report);
    let end = "Billed Duration: 52 ms\tMemory Size: 128 MB\tMax Memory Used: 35 MB\t\
               Restore Duration: 601.34 ms\tBilled Restore Duration: 50 ms\t\n";
    assert!(log.ends_with(end), "{log}");
}

#[test]
fn a_time_out_is_in_the_log_and_billed_up_to_the_limit() {
    let outcome = failed(TIMED_OUT, "RequestId: r-1 Error: Task timed out after 3.00 seconds");
    let log = log_of(&outcome, &InvocationReport::default());
    let (start, rest) = log.split_once("out\n").unwrap();
    assert_eq!(start, "START RequestId: r-1 Version: 3\n");
    let (time, rest) = rest.split_once(' ').unwrap();
    let form = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond]Z");
    assert!(time::PrimitiveDateTime::parse(time, form).is_ok(), "{time}");
    let expected = "r-1 Task timed out after 3.00 seconds\n\nEND RequestId: r-1\n\
                    REPORT RequestId: r-1\tDuration: 3004.00 ms\tBilled Duration: 3000 ms\t\
                    Memory Size: 128 MB\tMax Memory Used: 9 MB\tStatus: timeout\t\n";
    assert_eq!(rest, expected);
}

#[test]
fn the_end_of_a_runtime_is_in_the_log() {
    let text = "RequestId: r-1 Error: Runtime exited with error: exit status: 1";
    let log = log_of(&failed("Runtime.ExitError", text), &InvocationReport::default());
    assert!(
        log.contains(&format!("out\n{text}\nRuntime.ExitError\nEND RequestId: r-1\n")),
        "{log}"
    );
    assert!(log.ends_with("\tStatus: error\tError Type: Runtime.ExitError\t\n"), "{log}");
    // Python prints its own errors.
    let log = log_of(&failed("KeyError", "'x'"), &InvocationReport::default());
    assert!(log.contains("out\nEND RequestId: r-1\n") && !log.contains("Status"), "{log}");
}
