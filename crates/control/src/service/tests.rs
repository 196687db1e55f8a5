use std::time::Instant;

use super::testing::{new_function, options};
use super::*;
use crate::functions::Target;
use crate::telemetry::TraceContext;

#[tokio::test]
async fn requests_are_counted_for_the_function_that_they_were_sent_to() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::open(&options(folder.path()), None).unwrap();
    let target = Target::new("f", None).unwrap();
    let prepare = || {
        control.prepare(InvocationRequest {
            target: target.clone(),
            event: Vec::new(),
            function_arn: String::new(),
            client_context: None,
            trace_id: None,
            trace: TraceContext::default(),
            received: Instant::now(),
            hold: None,
        })
    };
    // No microVM starts here, so each request fails.
    let counted = || {
        let text = control.metrics();
        let line = text.lines().find(|line| line.contains("function=\"f\""));
        line.map(|line| line.rsplit(' ').next().unwrap().to_owned())
    };
    control.create_function(new_function("f")).await.unwrap();
    control.invoke(prepare().await.unwrap()).await.outcome.unwrap_err();
    let late = prepare().await.unwrap();
    assert_eq!(counted().as_deref(), Some("1"));
    control.delete(&target).await.unwrap();
    assert_eq!(counted(), None);
    control.create_function(new_function("f")).await.unwrap();
    control.invoke(late).await.outcome.unwrap_err();
    assert_eq!(counted(), None);
    control.invoke(prepare().await.unwrap()).await.outcome.unwrap_err();
    assert_eq!(counted().as_deref(), Some("1"));
}

#[tokio::test]
async fn space_for_not_one_disk_is_an_error_that_names_the_options() {
    let folder = tempfile::tempdir().unwrap();
    let overlay = folder.path().join("overlay");
    std::fs::File::create(&overlay).unwrap().set_len(512 << 20).unwrap();
    let mut options = options(folder.path());
    options.boot_files.overlay = overlay;
    options.scratch_size = Some(500 << 20);
    let error = Control::open(&options, None).unwrap_err().to_string();
    assert!(error.contains("has 500.0 MiB for guests' disks"), "{error}");
    assert!(error.contains("each takes 512.0 MiB"), "{error}");
    for option in ["--scratch-size", "--scratch", "--disk"] {
        assert!(error.contains(option), "{error}");
    }
    options.disk = Some(64 << 20);
    Control::open(&options, None).unwrap();
}
