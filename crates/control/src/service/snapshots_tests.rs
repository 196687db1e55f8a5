use std::path::PathBuf;
use std::time::Duration;

use firn_pool::{CreateOptions, GRANULE, MappedMedium, Pool, Server};
use firn_run::{FreezeInstanceError, PoolManagerError};
use firn_snapshot::{Destination, NotFrozen, NotFrozenError};
use firn_vmm::ControlError;

use super::super::testing::{new_function, options, version_when};
use super::super::{ControlOptions, NewFunction, PublishRequest};
use super::*;
use crate::functions::{PLANNER_VARIABLE, Target, snapshot_name};
use crate::instances::{FreezeError, LeaseRequest, LoadFailure};

/// A daemon whose only microVM is leased, and the lease.
async fn occupied(folder: &Path, queue_wait: Option<Duration>) -> (Arc<Control>, impl Sized) {
    let mut options = options(folder);
    options.monitors = 1;
    options.queue_wait = queue_wait.unwrap_or(options.queue_wait);
    let control = Control::open(&options, None).unwrap();
    let lease = occupy(&control).await;
    (control, lease)
}

/// Creates the function `f`, and leases a microVM.
async fn occupy(control: &Arc<Control>) -> impl Sized + use<> {
    let latest = control.create_function(new_function("f")).await.unwrap();
    let request = LeaseRequest { version: Arc::new(latest), new: true };
    control.fleet.acquire(request).await.unwrap()
}

#[tokio::test]
async fn a_publish_that_waited_too_long_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let (control, lease) = occupied(folder.path(), Some(Duration::from_millis(1))).await;
    let target = Target::new("f", None).unwrap();
    control.publish(&target, PublishRequest::default()).await.unwrap();
    let waiting = version_when(&control, "f", "1", |version| version.waiting.is_some()).await;
    assert_eq!(waiting.state, VersionState::Pending);
    assert!(waiting.waiting.unwrap().starts_with("attempt 1 "));
    drop(lease);
    let settled =
        version_when(&control, "f", "1", |version| version.state != VersionState::Pending).await;
    // The attempts that got a microVM started the program, which fails.
    let VersionState::Failed { reason } = settled.state else { panic!("{settled:?}") };
    assert!(reason.starts_with("the microVM did not start"), "{reason}");
    assert_eq!(settled.waiting, None);
}

#[tokio::test]
async fn the_freeze_of_a_version_ends_when_it_is_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let (control, _lease) = occupied(folder.path(), None).await;
    let target = Target::new("f", Some("1")).unwrap();
    let version = control.publish(&target, PublishRequest::default()).await.unwrap();
    // Beside the freeze that the publication started, which waits a minute for a microVM.
    let freezing = tokio::spawn(Arc::clone(&control).freeze(version));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!freezing.is_finished());
    control.delete(&target).await.unwrap();
    freezing.await.unwrap();
}

#[tokio::test]
async fn a_publish_whose_microvm_is_lost_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::open(&options(folder.path()), None).unwrap();
    control.create_function(NewFunction { publish: true, ..new_function("f") }).await.unwrap();
    let waiting = version_when(&control, "f", "1", |version| version.waiting.is_some()).await;
    assert_eq!(waiting.state, VersionState::Pending);
    let waiting = waiting.waiting.unwrap();
    assert!(waiting.starts_with("attempt 1 to freeze it failed: the microVM did not"), "{waiting}");
}

#[tokio::test]
async fn a_publish_waits_for_the_clients_of_an_earlier_manager_and_not_for_what_cannot_start() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::open(&options(folder.path()), None).unwrap();
    let attempts = |error: fn(String) -> PoolManagerError| {
        let failed = || PublishFailure::Load(LoadFailure::Start(error("why".to_owned()).into()));
        let mut lost = 0;
        (0..10).take_while(|_| control.is_passing(&failed(), &mut lost)).count()
    };
    let waits = |reason| PoolManagerError::HasClients { medium: "/pool".into(), reason };
    let fails = |reason| PoolManagerError::Start { medium: "/pool".into(), reason };
    assert_eq!((attempts(waits), attempts(fails)), (10, 2));
}

#[tokio::test]
async fn a_publish_waits_for_space_while_snapshots_are_purged() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::open(&options(folder.path()), None).unwrap();
    let full = || {
        let source = NotFrozen::Machine(ControlError::Refused("no space".to_owned()));
        let destination = Destination::Directory(folder.path().join("full"));
        FreezeInstanceError::Freeze(NotFrozenError { destination, source })
    };
    let attempts = || {
        let mut lost = 0;
        (0..10)
            .take_while(|_| control.is_passing(&FreezeError::from(full()).into(), &mut lost))
            .count()
    };
    assert_eq!(attempts(), 2);
    control.store.change(|change| change.purge("deleted")).unwrap();
    assert_eq!(attempts(), 10);
}

/// A pending version that names a planner, its snapshot, and the snapshot's directory.
async fn frozen(control: &Arc<Control>, name: &str, planner: &str) -> (Version, Frozen, PathBuf) {
    let mut new = new_function(name);
    let variables = [(PLANNER_VARIABLE.to_owned(), planner.to_owned())];
    new.configuration.environment = Some(variables.into());
    control.create_function(new).await.unwrap();
    let target = Target::new(name, None).unwrap();
    let version = control.publish(&target, PublishRequest::default()).await.unwrap();
    let name = snapshot_name(&version);
    let folder = control.fleet.launcher.snapshots.join(&name);
    std::fs::create_dir(&folder).unwrap();
    (version, Frozen { place: SnapshotPlace::Directory(name), bytes: 1 }, folder)
}

#[tokio::test]
async fn a_version_is_pending_until_its_planner_has_a_recording() {
    let folder = tempfile::tempdir().unwrap();
    // No version is frozen.
    let (control, _lease) = occupied(folder.path(), None).await;

    let (version, snapshot, path) = frozen(&control, "recorded", "reap").await;
    let planning = tokio::spawn({
        let control = Arc::clone(&control);
        async move { control.plan_when_recorded(&version, snapshot).await }
    });
    let told = format!("waits for a recording of {}: ", path.display());
    let waits = |version: &Version| version.waiting.as_ref().is_some_and(|w| w.starts_with(&told));
    let waiting = version_when(&control, "recorded", "1", waits).await;
    assert_eq!(waiting.state, VersionState::Pending);
    assert!(path.exists());
    planning.abort();
}

#[tokio::test]
async fn a_version_whose_planner_cannot_thaw_it_fails() {
    let folder = tempfile::tempdir().unwrap();
    // No version is frozen.
    let (control, _lease) = occupied(folder.path(), None).await;
    // No planner can, because no monitor starts here.
    let (version, snapshot, _) = frozen(&control, "named", "vanilla_dax").await;
    let error = control.plan_when_recorded(&version, snapshot).await.unwrap_err();
    assert_eq!(error.to_string(), "the planner that FIRN_PLANNER names cannot thaw the snapshot");
}

/// The manager of a pool in a file, which listens on a socket in `folder`.
fn manager(folder: &Path) -> Server {
    let file = folder.join("pool");
    let medium = Arc::new(MappedMedium::create_file(&file, 8 * GRANULE).unwrap());
    let pool = Pool::create(medium, &CreateOptions::default()).unwrap();
    Server::start(&folder.join("manager.sock"), pool).unwrap()
}

fn publish_in(manager: &Server, name: &str) {
    manager.pool().allocate(name, GRANULE, 0).unwrap().publish().unwrap();
}

/// A daemon with such a pool.
fn with_pool(folder: &Path, monitors: usize) -> Arc<Control> {
    let pool = Some(folder.join("manager.sock"));
    let queue_wait = Duration::from_millis(1);
    let options = ControlOptions { pool, monitors, queue_wait, ..options(folder) };
    Control::open(&options, None).unwrap()
}

/// Waits until the pool has no snapshot and the daemon nothing to purge.
async fn all_purged(manager: &Server, control: &Control) {
    let left = || (manager.pool().names(), control.store.to_purge().unwrap());
    for _ in 0..6000 {
        if left() == (Vec::new(), Vec::new()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{:?}", left());
}

#[tokio::test]
async fn a_snapshot_whose_pool_has_no_manager_at_first_is_purged_later() {
    let folder = tempfile::tempdir().unwrap();
    let first = manager(folder.path());
    let control = with_pool(folder.path(), 1);
    control.store.change(|change| change.purge("unused")).unwrap();
    drop(first);
    control.recover().await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(control.store.to_purge().unwrap(), ["unused"]);
    std::fs::remove_file(folder.path().join("pool")).unwrap();
    let second = manager(folder.path());
    publish_in(&second, "unused");
    all_purged(&second, &control).await;
}

#[tokio::test]
async fn a_snapshot_that_an_earlier_daemons_monitor_publishes_late_is_purged() {
    let folder = tempfile::tempdir().unwrap();
    let manager = manager(folder.path());
    let control = with_pool(folder.path(), 1);
    control.store.change(|change| change.purge("late")).unwrap();
    control.recover().await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    publish_in(&manager, "late");
    all_purged(&manager, &control).await;
}

#[tokio::test]
async fn a_snapshot_that_was_published_before_its_freeze_failed_is_purged() {
    let folder = tempfile::tempdir().unwrap();
    let manager = manager(folder.path());
    let control = with_pool(folder.path(), 1);
    control.create_function(NewFunction { publish: true, ..new_function("f") }).await.unwrap();
    let version = version_when(&control, "f", "1", |_| true).await;
    // As by a monitor that is lost before it answers.
    publish_in(&manager, &snapshot_name(&version));
    version_when(&control, "f", "1", |version| version.state != VersionState::Pending).await;
    all_purged(&manager, &control).await;
}

#[tokio::test]
async fn a_snapshot_that_was_published_before_its_version_was_deleted_is_purged() {
    let folder = tempfile::tempdir().unwrap();
    let manager = manager(folder.path());
    let control = with_pool(folder.path(), 1);
    let _lease = occupy(&control).await;
    let target = Target::new("f", Some("1")).unwrap();
    let version = control.publish(&target, PublishRequest::default()).await.unwrap();
    version_when(&control, "f", "1", |version| version.waiting.is_some()).await;
    publish_in(&manager, &snapshot_name(&version));
    control.delete(&target).await.unwrap();
    all_purged(&manager, &control).await;
}
