//! Thaws a snapshot of a function, sends it one event, and prints the answer:
//! `cargo run -p firn-run --example thaw -- SNAPSHOT EVENT`

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firn_run::{Clock, Descriptors, HostSpec, InvokeSpec, Listener, Origin, ReplaySpec};
use firn_run::{SourceSpec, StartReport, StartSpec, ThawSpec, start};

struct Printer;

impl Listener for Printer {
    fn started(&self, report: &StartReport) {
        let answer = report.outcome.as_ref().and_then(|outcome| outcome.answer.as_ref());
        let ms = report.times.total_ns as f64 / 1e6;
        self.note(&format!("{} after {ms:.1} ms", answer.map_or("no answer", |json| json.get())));
    }

    #[allow(clippy::print_stdout, reason = "an example prints")]
    fn note(&self, text: &str) {
        println!("{text}");
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(event)) = (arguments.next(), arguments.next()) else {
        return Err("usage: thaw SNAPSHOT EVENT".into());
    };
    let mut descriptors = Descriptors::default();
    let (source, root) = SourceSpec::directory_with_root(path.as_ref(), None, &mut descriptors)?;
    let thaw = ThawSpec {
        source,
        planner: "firecracker".to_owned(),
        preloaded: false,
        root,
        invoke: Some(InvokeSpec { event, keep: false, compare: false }),
        replay: ReplaySpec::default(),
        record: None,
    };
    let (_claimed, host) = HostSpec::claim(None, None, true, &mut descriptors)?;
    let spec = StartSpec::new(Origin::Thaw(thaw), host, Duration::from_secs(60));
    let (kvm, listener) = (Path::new("/dev/kvm").into(), Arc::new(Printer) as Arc<dyn Listener>);
    Ok(start(&spec, descriptors, kvm, Clock::now(), &listener)?)
}
