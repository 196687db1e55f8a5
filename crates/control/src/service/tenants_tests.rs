use std::path::Path;
use std::sync::Arc;

use firn_run::{Descriptors, SourceSpec};

use super::super::testing::{new_function, options, version_when, zip_of};
use super::super::{ChangeError, CodeChange, Control, OpenError, PublishError, PublishRequest};
use super::*;
use crate::functions::{ConfigurationChange, PLANNER_VARIABLE, SnapshotPlace, VersionSnapshot};
use crate::instances::{LaunchError, LeaseRequest, ThawKey};

const MIB: u64 = 1 << 20;

fn target(name: &str, tenant: &str) -> Target {
    Target::new(name, None).unwrap().of_tenant(Some(tenant.to_owned()))
}

/// A service on which the tenant `a` has these quotas.
fn control(folder: &Path, quotas: Quotas) -> Arc<Control> {
    open(folder, quotas).unwrap()
}

fn open(folder: &Path, quotas: Quotas) -> Result<Arc<Control>, OpenError> {
    let mut options = options(folder);
    options.monitors = 1;
    options.tenants.named.insert("a".to_owned(), quotas);
    Control::open(&options, None)
}

/// The service after a restart with other quotas.
async fn reopened(service: Arc<Control>, folder: &Path, quotas: Quotas) -> Arc<Control> {
    drop(service);
    // The tasks of the first service end with the lock of its directory.
    loop {
        match open(folder, quotas.clone()) {
            Ok(service) => return service,
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
        }
    }
}

async fn create(control: &Arc<Control>, name: &str, tenant: &str) -> Result<Version, ChangeError> {
    let new = new_function(name);
    control.create_function(super::super::NewFunction { target: target(name, tenant), ..new }).await
}

async fn publish(control: &Arc<Control>, name: &str) -> Result<Version, PublishError> {
    control.publish(&target(name, "a"), PublishRequest::default()).await
}

/// Takes the only microVM, so that published versions stay pending.
async fn hold(control: &Arc<Control>, version: Version) -> impl Sized {
    let request = LeaseRequest { version: Arc::new(version), new: true };
    control.fleet.acquire(request).await.unwrap()
}

fn code(contents: &[u8]) -> CodeChange {
    CodeChange { zip: zip_of(contents), publish: false, dry_run: false, revision: None, hold: None }
}

#[tokio::test]
async fn functions_are_limited_also_at_once_and_freed() {
    let folder = tempfile::tempdir().unwrap();
    let service = control(folder.path(), Quotas { functions: Some(3), ..Quotas::default() });
    let tasks = (0..8).map(|number| {
        let service = Arc::clone(&service);
        tokio::spawn(async move { create(&service, &format!("f{number}"), "a").await })
    });
    let mut created = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        match task.await.unwrap() {
            Ok(version) => created.push(version.function),
            Err(error) => assert_eq!(
                error.to_string(),
                "there would be 4 functions, and the quota of the tenant a is 3: delete functions"
            ),
        }
    }
    let files = std::fs::read_dir(folder.path().join("data/code")).unwrap().count();
    assert_eq!((created.len(), files), (3, 3));
    // The functions of others do not count, and those that there are can be changed.
    create(&service, "other", "b").await.unwrap();
    let service =
        reopened(service, folder.path(), Quotas { functions: Some(1), ..Quotas::default() }).await;
    service.update_code(&target(&created[0], "a"), code(b"new")).await.unwrap();
    for name in &created[..2] {
        service.delete(&target(name, "a")).await.unwrap();
    }
    create(&service, "g", "a").await.unwrap_err();
    service.delete(&target(&created[2], "a")).await.unwrap();
    create(&service, "g", "a").await.unwrap();
}

#[tokio::test]
async fn versions_are_limited_also_at_once_and_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let quotas = Quotas { versions: Some(3), ..Quotas::default() };
    let service = control(folder.path(), quotas.clone());
    let names: Vec<String> = (0..8).map(|number| format!("f{number}")).collect();
    for name in &names {
        create(&service, name, "a").await.unwrap();
    }
    let tasks = names.clone().into_iter().map(|name| {
        let service = Arc::clone(&service);
        tokio::spawn(async move { publish(&service, &name).await })
    });
    let mut published = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        match task.await.unwrap() {
            Ok(version) => published.push(version.function),
            Err(error) => assert_eq!(
                error.to_string(),
                "4 versions would be published, and the quota of the tenant a is 3: delete versions"
            ),
        }
    }
    assert_eq!(published.len(), 3);
    // A version that is not new takes nothing.
    publish(&service, &published[0]).await.unwrap();
    // Another tenant has quotas of its own.
    create(&service, "other", "b").await.unwrap();
    service.publish(&target("other", "b"), PublishRequest::default()).await.unwrap();
    let service = reopened(service, folder.path(), quotas).await;
    let free = names.iter().find(|name| !published.contains(name)).unwrap();
    let refused = publish(&service, free).await.unwrap_err();
    assert!(matches!(refused, PublishError::Quota(_)), "{refused}");
    service.delete(&target(&published[0], "a")).await.unwrap();
    publish(&service, free).await.unwrap();
}

#[tokio::test]
async fn code_is_limited_counted_once_and_freed() {
    let folder = tempfile::tempdir().unwrap();
    let size = u64::try_from(new_function("f").zip.len()).unwrap();
    let quotas = Quotas { code: Some(2 * size + 10), ..Quotas::default() };
    let service = control(folder.path(), quotas);
    let files = || std::fs::read_dir(folder.path().join("data/code")).unwrap().count();
    create(&service, "f", "a").await.unwrap();
    publish(&service, "f").await.unwrap();
    create(&service, "g", "a").await.unwrap();
    assert_eq!(files(), 2);
    let refused = create(&service, "h", "a").await.unwrap_err();
    assert!(
        refused.to_string().contains("the quota of the tenant a is"),
        "the code of f and its version counts once: {refused}"
    );
    // The version keeps the code that the function had.
    let refused = service.update_code(&target("f", "a"), code(b"new")).await.unwrap_err();
    assert!(matches!(refused, ChangeError::Quota(_)), "{refused}");
    assert_eq!(files(), 2, "refused code is removed");
    // The same code takes nothing.
    service.update_code(&target("g", "a"), code(b"f")).await.unwrap();
    assert_eq!(files(), 1);
    create(&service, "h", "a").await.unwrap();
    service.delete(&target("h", "a")).await.unwrap();
    create(&service, "i", "a").await.unwrap();
}

#[tokio::test]
async fn snapshots_are_limited_from_the_publishing_on() {
    let folder = tempfile::tempdir().unwrap();
    // Each guest has 192 MiB.
    let quotas = Quotas { snapshots: Some(400 * MIB), ..Quotas::default() };
    let service = control(folder.path(), quotas);
    let mut latest = Vec::new();
    for name in ["f", "g", "h"] {
        latest.push(create(&service, name, "a").await.unwrap());
    }
    let held = hold(&service, latest.remove(0)).await;
    publish(&service, "f").await.unwrap();
    publish(&service, "g").await.unwrap();
    let refused = publish(&service, "h").await.unwrap_err().to_string();
    assert_eq!(
        refused,
        "the snapshots would take 576.0 MiB, and the quota of the tenant a is 400.0 MiB: delete versions with SnapStart"
    );
    assert!(service.versions(&target("h", "a")).await.unwrap().len() == 1, "nothing was published");
    // A version that failed has no snapshot.
    drop(held);
    version_when(&service, "f", "1", |version| version.state != VersionState::Pending).await;
    publish(&service, "h").await.unwrap();
}

/// The guest of each version has 192 MiB.
#[tokio::test]
async fn frozen_snapshots_count_with_what_they_take_in_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let service =
        control(folder.path(), Quotas { snapshots: Some(300 * MIB), ..Quotas::default() });
    let mut latest = Vec::new();
    for name in ["directory", "pool", "new"] {
        latest.push(create(&service, name, "a").await.unwrap());
    }
    let freeze = |latest: &Version, place| {
        let (planner, bytes) = ("firecracker".to_owned(), 50 * MIB);
        let snapshot = Some(VersionSnapshot { place, bytes, planner, root: None, network: false });
        let version = Version { version: "1".to_owned(), snapshot, ..latest.clone() };
        let stored = service.store.change(|change| {
            change.put_version(&version.function, 1, &version)?;
            Ok::<_, StoreError>(usage(change, Some("a"))?.snapshots)
        });
        stored.unwrap()
    };
    assert_eq!(freeze(&latest[0], SnapshotPlace::Directory("d".to_owned())), 50 * MIB);
    assert_eq!(freeze(&latest[1], SnapshotPlace::Pool("p".to_owned())), (50 + 192) * MIB);
    let refused = publish(&service, "new").await.unwrap_err().to_string();
    assert!(refused.starts_with("the snapshots would take 434.0 MiB, and the quota"), "{refused}");
}

#[tokio::test]
async fn planners_outside_the_list_are_refused_for_changes_and_versions_too() {
    let folder = tempfile::tempdir().unwrap();
    let allow =
        |planner: &str| Quotas { planners: Some(vec![planner.to_owned()]), ..Quotas::default() };
    let service = control(folder.path(), allow("firn"));
    create(&service, "f", "a").await.unwrap();
    let f = target("f", "a");
    let choose = |service: &Arc<Control>, planner: &str| {
        let variables = [(PLANNER_VARIABLE.to_owned(), planner.to_owned())];
        let change = ConfigurationChange {
            environment: Some(variables.into()),
            ..ConfigurationChange::default()
        };
        let (service, f) = (Arc::clone(service), f.clone());
        async move { service.update_configuration(&f, change, None).await }
    };
    let told = "FIRN_PLANNER: the planner firn is not allowed; allowed: pass";
    choose(&service, "firn").await.unwrap();
    choose(&service, "pass").await.unwrap_err();
    let chosen = service.find(&f).await.unwrap().version.environment;
    assert_eq!(chosen[PLANNER_VARIABLE], "firn");
    // The list changes afterwards.
    let service = reopened(service, folder.path(), allow("pass")).await;
    let refused = service.publish(&f, PublishRequest::default()).await.unwrap_err();
    assert_eq!(refused.to_string(), told);
    let refused = service.update_code(&f, code(b"new")).await.unwrap_err();
    assert_eq!(refused.to_string(), told);
    assert_eq!(service.versions(&f).await.unwrap().len(), 1, "nothing was published");
    choose(&service, "pass").await.unwrap();
    service.publish(&f, PublishRequest::default()).await.unwrap();
}

#[tokio::test]
async fn planners_outside_the_list_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut quotas = Quotas::default();
    quotas.set("planners", "firn, firecracker:readahead=off").unwrap();
    let service = control(folder.path(), quotas);
    let choose = |planner: &str| {
        let mut new = new_function(&planner.replace(|c: char| !c.is_alphanumeric(), "-"));
        let variables = [(PLANNER_VARIABLE.to_owned(), planner.to_owned())];
        new.configuration.environment = Some(variables.into());
        new.target = new.target.of_tenant(Some("a".to_owned()));
        service.create_function(new)
    };
    for allowed in ["firn", "firn:granule=16k", "firecracker:readahead=off"] {
        choose(allowed).await.unwrap();
    }
    for refused in ["pass", "firecracker", "firecracker:readahead=on"] {
        let error = choose(refused).await.unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "FIRN_PLANNER: the planner {refused} is not allowed; allowed: firn, firecracker:readahead=off"
            )
        );
    }
    let mut quotas = Quotas::default();
    for (name, value) in [
        ("planners", "warp"),
        ("functions", "-1"),
        ("versions", "x"),
        ("code", "1 X"),
        ("cpu", "1"),
    ] {
        quotas.set(name, value).unwrap_err();
    }
}

#[tokio::test]
async fn a_snapshot_is_thawed_with_the_key_of_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path());
    options.snapshot_keys = Some(folder.path().join("keys"));
    let service = Control::open(&options, None).unwrap();
    create(&service, "f", "a").await.unwrap();
    let version = publish(&service, "f").await.unwrap();
    assert_eq!(version.owner.as_deref(), Some("a"));
    let launcher = &service.fleet.launcher;
    let snapshot = launcher.snapshots.join("s");
    std::fs::create_dir(&snapshot).unwrap();
    std::fs::write(folder.path().join("root"), "").unwrap();
    // A daemon parses no snapshot.
    std::fs::write(snapshot.join("snapshot.firn"), "").unwrap();
    let thaw_from = |place: SnapshotPlace, owner: Option<String>| {
        let root = folder.path().join("root");
        let key = ThawKey {
            place,
            owner,
            planner: "firecracker".to_owned(),
            root,
            disk: 0,
            network: false,
        };
        // A standby monitor is connected to the pool's manager already.
        launcher.thaw_spec(&key, true, &mut Descriptors::default())
    };
    let thaw = |owner| thaw_from(SnapshotPlace::Directory("s".to_owned()), owner);
    assert!(matches!(thaw(version.owner.clone()), Err(LaunchError::Key(_))));
    let keys = launcher.keys.as_ref().unwrap();
    let signer = keys.signer(version.owner.as_deref()).unwrap();
    for place in [SnapshotPlace::Directory("s".to_owned()), SnapshotPlace::Pool("s".to_owned())] {
        let source = thaw_from(place.clone(), version.owner.clone()).unwrap().source;
        let (SourceSpec::Directory { verifier, .. } | SourceSpec::Pool { verifier, .. }) = source;
        assert_eq!(verifier.as_deref(), Some(&signer.verifier()));
        assert!(matches!(thaw_from(place, None), Err(LaunchError::Key(_))));
    }
}
