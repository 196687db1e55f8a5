//! The log of a request in AWS Lambda's form: `START`, the function's output, `END`, `REPORT`.

use std::fmt::Write;
use std::time::Duration;

use firn_run::{Answer, Failed};
use time::OffsetDateTime;
use time::macros::format_description;

use super::report::InvocationReport;
use super::requests::FATAL;
use crate::functions::Version;
use crate::metrics::StartKind;

/// The end of the function's own time limit.
const TIMED_OUT: &str = "Sandbox.Timedout";

/// The log of a request that reached the function. Its last line is `REPORT`.
pub(super) fn log(
    version: &Version,
    request_id: &str,
    outcome: &Result<Answer, Failed>,
    report: &InvocationReport,
) -> String {
    let (output, duration, memory, error) = match outcome {
        Ok(answer) => (answer.logs.as_str(), answer.duration, answer.max_memory, None),
        Err(failed) => {
            let usage = failed.usage.as_deref().copied().unwrap_or_default();
            let duration = Duration::from_nanos(usage.duration_ns);
            (&*failed.logs, duration, usage.max_memory_bytes, Some(&failed.error))
        }
    };
    let mut log = format!("START RequestId: {request_id} Version: {}\n{output}", version.version);
    if !log.ends_with('\n') {
        log.push('\n');
    }
    let mut status = String::new();
    // The runtime itself prints other errors.
    if let Some(error) = error.filter(|error| FATAL.contains(&error.error_type.as_str())) {
        let (kind, text) = (error.error_type.as_str(), error.error_message.as_str());
        let text = text.split_once(" Error: ").map_or(text, |(_, text)| text);
        if kind == TIMED_OUT {
            "\tStatus: timeout".clone_into(&mut status);
            let _ = write!(log, "{} {request_id} {text}\n\n", now());
        } else {
            status = format!("\tStatus: error\tError Type: {kind}");
            let _ = write!(log, "RequestId: {request_id} Error: {text}\n{kind}\n");
        }
    }
    let (start, billed_start) = start(report);
    let billed = duration.min(Duration::from_secs(version.timeout.into())) + billed_start;
    let _ = writeln!(
        log,
        "END RequestId: {request_id}\nREPORT RequestId: {request_id}\tDuration: {:.2} ms\t\
         Billed Duration: {} ms\tMemory Size: {} MB\tMax Memory Used: {} MB{start}{status}\t",
        milliseconds(duration),
        billed_milliseconds(billed),
        version.memory,
        memory.div_ceil(1 << 20),
    );
    log
}

/// What `REPORT` states of a start for the request, and the billed part of that time: the
/// initialisation of the function, or its after-restore hooks with the other steps in the guest.
fn start(report: &InvocationReport) -> (String, Duration) {
    match (report.start, report.init_ns, &report.thaw) {
        (Some(StartKind::cold), Some(init), _) => {
            let init = Duration::from_nanos(init);
            (format!("\tInit Duration: {:.2} ms", milliseconds(init)), init)
        }
        (Some(StartKind::thawed), _, Some(thaw)) => {
            let restore = Duration::from_nanos(report.start_ns);
            let billed = Duration::from_nanos(thaw.times.identify_ns.unwrap_or_default());
            let text = format!(
                "\tRestore Duration: {:.2} ms\tBilled Restore Duration: {} ms",
                milliseconds(restore),
                billed_milliseconds(billed)
            );
            (text, billed)
        }
        _ => (String::new(), Duration::ZERO),
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// Rounded up.
fn billed_milliseconds(duration: Duration) -> u128 {
    duration.as_nanos().div_ceil(1_000_000)
}

fn now() -> String {
    let form =
        format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");
    // Formatting fails only for years outside 0 to 9999.
    OffsetDateTime::now_utc().format(form).unwrap_or_default()
}

#[cfg(test)]
#[path = "lambda_log_tests.rs"]
mod tests;
