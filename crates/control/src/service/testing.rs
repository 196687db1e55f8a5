//! A service with its database but without microVMs: the `firn` program is one that fails.

use std::collections::BTreeMap;
use std::io::{Cursor, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use zip::DateTime;
use zip::write::{SimpleFileOptions, ZipWriter};

use super::{Control, ControlOptions, NewFunction, Tenants};
use crate::functions::{ConfigurationChange, Runtime, Target, Version};
use crate::instances::BootFiles;

/// Its configuration, with the data in `folder`.
pub(crate) fn options(folder: &Path) -> ControlOptions {
    ControlOptions {
        data: folder.join("data"),
        scratch: None,
        scratch_size: None,
        disk: None,
        recover: false,
        program: "/bin/false".into(),
        monitor_program: "/bin/false".into(),
        kvm: "/dev/kvm".into(),
        software_kvm: false,
        boot_files: BootFiles {
            kernel: "/bin/false".into(),
            initramfs: "/bin/false".into(),
            root: "/bin/false".into(),
            overlay: "/bin/false".into(),
        },
        images: None,
        standby: 0,
        ready: 0,
        pool: None,
        snapshot_keys: None,
        planners: vec!["firecracker".into()],
        memory: 1 << 40,
        monitors: 9,
        jail: Default::default(),
        network: None,
        one_cpu: None,
        measured: true,
        queue: 9,
        event_bytes: 1 << 30,
        event_pause: Duration::ZERO,
        queue_wait: Duration::from_secs(60),
        keep_alive: Duration::from_secs(60),
        pause_idle: true,
        start_limit: Duration::from_secs(60),
        region: "eu-north-1".into(),
        roles: None,
        tenants: Tenants::default(),
    }
}

/// A zip file with one file.
pub(crate) fn zip_of(contents: &[u8]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().last_modified_time(DateTime::default());
    zip.start_file("handler.py", options).unwrap();
    zip.write_all(contents).unwrap();
    zip.finish().unwrap().into_inner()
}

/// A function with SnapStart that is not created yet.
pub(crate) fn new_function(name: &str) -> NewFunction {
    NewFunction {
        target: Target::new(name, None).unwrap(),
        configuration: ConfigurationChange {
            runtime: Some(Runtime::Python311),
            handler: Some("handler.handler".into()),
            role: Some("arn:aws:iam::000000000000:role/any".into()),
            snap_start: Some(true),
            ..ConfigurationChange::default()
        },
        zip: zip_of(name.as_bytes()),
        tags: BTreeMap::new(),
        publish: false,
        hold: None,
    }
}

/// A version, once `done` accepts it.
pub(crate) async fn version_when(
    control: &Arc<Control>,
    name: &str,
    number: &str,
    done: impl Fn(&Version) -> bool,
) -> Version {
    let target = Target::new(name, Some(number)).unwrap();
    loop {
        let found = control.find(&target).await.unwrap().version;
        if done(&found) {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
