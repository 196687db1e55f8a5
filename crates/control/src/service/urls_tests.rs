use super::super::testing::{new_function, options};
use super::*;
use crate::functions::EventSettings;

#[tokio::test]
async fn an_id_is_that_of_its_own_url_only() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::open(&options(folder.path()), None).unwrap();
    control.create_function(new_function("f")).await.unwrap();
    let target = Target::new("f", None).unwrap();
    let first = control.create_url(&target, false, false, None).await.unwrap();
    let second = FunctionUrl { id: "second".into(), ..first.clone() };
    // A read of the table of ids before a change, and of the URL after it, finds the same.
    let set = |url: FunctionUrl| {
        control.store.change(|change| {
            let mut attachments = change.attachments("f", LATEST)?;
            attachments.url = Some(url);
            change.put_attachments("f", LATEST, &attachments)
        })
    };
    set(second.clone()).unwrap();
    let found = control.url_of("second").await.unwrap().expect("the URL exists");
    assert_eq!(found.url, second);
    assert!(control.url_of(&first.id).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_of_events_are_deleted_once() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::open(&options(folder.path()), None).unwrap();
    control.create_function(new_function("f")).await.unwrap();
    let target = Target::new("f", None).unwrap();
    let settings = Some(EventSettings::default());
    control.set_event_settings(&target, move |_| settings).await.unwrap();
    let mut deletions = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (control, target) = (Arc::clone(&control), target.clone());
        deletions.spawn(async move { control.delete_event_settings(&target).await.unwrap() });
    }
    let deleted = deletions.join_all().await;
    assert_eq!(deleted.iter().filter(|deleted| **deleted).count(), 1, "{deleted:?}");
}
