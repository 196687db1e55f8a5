use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;

use firn_base::GuestRange;
use firn_memory::planners::{ImageFacts, PlanInput, parse};
use firn_memory::{HostFacts, LoadFile, Plan, Sources, Step, When, Work, execute};
use firn_snapshot::{MemoryLayout, PageSet};

use super::*;

const LEN: u64 = 1 << 20;

/// An image, and a plan for it with one step.
fn planned(when: When, work: Work) -> (File, Plan) {
    let mut image = tempfile::tempfile().unwrap();
    image.write_all(&vec![7; 1 << 20]).unwrap();
    let layout = MemoryLayout::for_size(LEN).unwrap();
    let input = PlanInput {
        layout: &layout,
        image: ImageFacts::of(&image).unwrap(),
        zero_map: &PageSet::new(LEN / 4096),
        profile: None,
        snapshot: None,
        copies: None,
        host: &HostFacts::read().unwrap(),
    };
    let mut plan = parse("firecracker").unwrap().plan(&input).unwrap();
    plan.schedule = vec![Step { when, work }];
    (image, plan)
}

#[test]
fn a_failed_loader_does_not_fail_the_restore() {
    let work = Work::Load { file: LoadFile::Image, offset: 0, len: LEN };
    let (image, plan) = planned(When::AtRequest, work);
    // A pipe does not support read-ahead.
    let (pipe, _writer) = std::io::pipe().unwrap();
    let loader = Loader::start(&plan, &Sources::image(&OwnedFd::from(pipe).into()), 0).unwrap();
    let executed = execute(&plan, &Sources::image(&image)).unwrap();
    let mut background =
        Background::start(Some(executed.after_resume), Arc::new(executed.memory), loader);
    background.finish().unwrap();
    let loaded = background.loaded().unwrap();
    assert_eq!((loaded.done, loaded.ranges, loaded.bytes), (false, 1, LEN));
}

#[test]
fn the_loaders_report_is_final_when_the_loader_is_done() {
    let work = Work::Load { file: LoadFile::Image, offset: 0, len: LEN };
    let (image, plan) = planned(When::AtRequest, work);
    let loader = Loader::start(&plan, &Sources::image(&image), 0).unwrap();
    let executed = execute(&plan, &Sources::image(&image)).unwrap();
    let mut background =
        Background::start(Some(executed.after_resume), Arc::new(executed.memory), loader);
    while !background.loaded().unwrap().done {
        std::thread::yield_now();
    }
    assert!(background.loaded().unwrap().loaded);
    background.finish().unwrap();
    assert!(background.loaded().unwrap().done);
}

#[test]
fn a_failed_step_fails_the_restore() {
    let guest = GuestRange { start: 0, len: LEN };
    let (image, plan) = planned(When::AfterResume, Work::Index { guest });
    let executed = execute(&plan, &Sources::image(&image)).unwrap();
    image.set_len(4096).unwrap();
    let mut background =
        Background::start(Some(executed.after_resume), Arc::new(executed.memory), None);
    assert_eq!(background.loaded(), None);
    let error = background.finish().unwrap_err();
    assert!(matches!(error, StepError::Index { .. }), "{error}");
}
