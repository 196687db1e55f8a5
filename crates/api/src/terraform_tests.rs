//! A daemon with other people's clients, for all that needs no microVM.

use std::path::Path;
use std::process::Command;

use tokio::sync::watch;

use crate::serve::{open, router};
use crate::server::{self, Listen, Listener};
use crate::tests::{World, cache, clients};

/// Requires the part `clients`: boto3 from `make clients`, and a Python.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_terraform_sets_is_what_it_reads() {
    let Some(clients) = clients() else { return };
    serve("terraform.py", |python, _| {
        python.env("PYTHONPATH", clients).env("PYTHONDONTWRITEBYTECODE", "1");
        python.env("AWS_ACCESS_KEY_ID", "any").env("AWS_SECRET_ACCESS_KEY", "any");
        python.env("AWS_DEFAULT_REGION", "us-east-1");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs tools from npm and PyPI: make test-tools"]
async fn tools_deploy_as_far_as_the_documents_say() {
    let tools = cache().expect("neither FIRN_CACHE nor HOME is set").join("deploy-tools");
    serve("tools.py", |python, work| {
        python.arg(tools).arg(work);
    })
    .await;
}

/// Runs a script that gets the endpoint of a daemon, and prints `done`.
async fn serve(script: &str, change: impl FnOnce(&mut Command, &Path)) {
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
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients").join(script);
    let mut python = Command::new("python3");
    python.arg(script).arg(format!("http://{address}")).env("HOME", world.directory.path());
    change(&mut python, &world.directory.path().join("work"));
    let output = tokio::task::spawn_blocking(move || python.output()).await.unwrap().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"done\n", "{error}");
    drop(stop);
    serving.await.unwrap();
}
