//! A daemon with boto3 as its client, for all that needs no microVM. Requires the part `clients`:
//! boto3 from `make clients`, and a Python.

use std::path::Path;
use std::process::Command;

use tokio::sync::watch;

use crate::serve::{open, router};
use crate::server::{self, Listen, Listener};
use crate::tests::{World, clients};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_terraform_sets_is_what_it_reads() {
    let Some(clients) = clients() else { return };
    let world = World::new();
    let mut options = world.options();
    options.account = "000000000000".into();
    options.control.region = "us-east-1".into();
    let listener = Listener::bind(&options.listen).await.unwrap();
    let Listen::Tcp(address) = listener.address().unwrap() else { panic!("no address") };
    let routes = router(open(&options).unwrap(), &options);
    let (stop, stopped) = watch::channel(false);
    let limits = options.limits.clone();
    let serving =
        tokio::spawn(async move { server::run(listener, routes, &limits, stopped).await });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients/terraform.py");
    let mut python = Command::new("python3");
    python.arg(script).arg(format!("http://{address}"));
    python.env("PYTHONPATH", clients).env("PYTHONDONTWRITEBYTECODE", "1");
    python.env("AWS_ACCESS_KEY_ID", "any").env("AWS_SECRET_ACCESS_KEY", "any");
    python.env("AWS_DEFAULT_REGION", "us-east-1").env("HOME", world.directory.path());
    let output = tokio::task::spawn_blocking(move || python.output()).await.unwrap().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"done\n", "{error}");
    drop(stop);
    serving.await.unwrap();
}
