//! Profiles of players match their traces.

use std::collections::BTreeSet;
use std::path::Path;

use firn_base::PageRange;
use firn_memory::Leaf;
use firn_memory::page_cache::evict;
use firn_memory::recorders::{Part, ProfileRecordError, of};
use firn_memory::trace::{Access, Trace};
use firn_player::format::PAGE;
use firn_run::RecordError;
use firn_snapshot::{CHUNK_PAGES, Destination, PageSet, Profile, Snapshot};
use firn_vmm::{KVM_DEVICE, Virtualization};

use super::{PlayerInputs, PlayerOptions, freeze};
use crate::testing::record;
use crate::traces::{NamedTrace, load};

fn player(traces: &[&str], dir: &Path) -> (Vec<NamedTrace>, Snapshot) {
    let traces: Vec<NamedTrace> = traces.iter().map(|name| load(name).unwrap()).collect();
    let path = dir.join("snapshot");
    let destination = Destination::Directory(path.clone());
    let inputs = PlayerInputs::new(traces.clone()).unwrap();
    freeze(&inputs, &PlayerOptions::default(), KVM_DEVICE.as_ref(), destination, false).unwrap();
    (traces, Snapshot::open(&path).unwrap())
}

fn recorded(snapshot: &Snapshot, input: &str, parts: &[Part]) -> Profile {
    let id = snapshot.manifest().description.id;
    let mut profile = Profile::of(id);
    for recorder in of(parts) {
        record(snapshot, Some(input), recorder, &mut profile).unwrap();
    }
    profile.check(id, snapshot.manifest().layout.pages()).unwrap();
    profile
}

/// A directory whose files can be evicted from the page cache; `None` on tmpfs.
fn directory_on_a_medium() -> Option<tempfile::TempDir> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, [1; 4096]).unwrap();
    let cold = evict(&std::fs::File::open(path).unwrap()).unwrap().is_cold();
    firn_required::has("disk", cold).then_some(dir)
}

/// Image pages of these touches, in order.
fn pages(trace: &Trace, of: impl Fn(Access) -> bool) -> Vec<u64> {
    let touches = trace.touches().iter().filter(|touch| of(touch.access));
    touches.map(|touch| trace.layout().image_offset(touch.page * PAGE).unwrap() / PAGE).collect()
}

fn flat(runs: &[PageRange]) -> Vec<u64> {
    runs.iter().flat_map(PageRange::range).collect()
}

#[test]
fn faults_and_writes_are_those_of_the_trace_and_of_the_input() {
    let dir = tempfile::tempdir().unwrap();
    let (traces, snapshot) = player(&["json-a", "json-b"], dir.path());
    let software = Virtualization::of_host() == Virtualization::Software;
    let mut all = Vec::new();
    for NamedTrace { name, trace } in &traces {
        let profile = recorded(&snapshot, name, &[Part::Faults, Part::Writes]);
        assert_eq!(profile.inputs, [name.as_str()]);
        assert_eq!(profile.groups, None);
        // The player's pages are above the trace's pages.
        let own = trace.layout().pages();
        let faults = flat(profile.faults.as_ref().unwrap());
        let (traced, of_the_player): (Vec<u64>, Vec<u64>) =
            faults.iter().copied().partition(|page| *page < own);
        assert!(traced == pages(trace, |access| access != Access::LaterWrite), "{name}");
        let traced_pages = traced.len();
        assert!(!of_the_player.is_empty() && of_the_player.len() < 1000, "{of_the_player:?}");
        let written = flat(profile.written.as_ref().unwrap());
        let (traced, of_the_player): (Vec<u64>, Vec<u64>) =
            written.iter().partition(|page| **page < own);
        let expected: BTreeSet<u64> =
            pages(trace, |access| access != Access::Read).into_iter().collect();
        assert!(traced == expected.into_iter().collect::<Vec<_>>(), "{name}");
        // Only the stack; hardware walks page tables for writing.
        let most = if software { 16 } else { 64 };
        assert!(of_the_player.len() <= most, "{of_the_player:?}");
        // The player maps a chunk by small leaves if the trace has a small leaf in it, and by a
        // large one too.
        let small: BTreeSet<u64> = trace
            .touches()
            .iter()
            .filter(|touch| touch.leaf == Leaf::Size4K)
            .map(|touch| touch.page / CHUNK_PAGES)
            .collect();
        let touched = pages(trace, |access| access != Access::LaterWrite).into_iter();
        let expected: BTreeSet<u64> =
            touched.filter(|page| small.contains(&(page / CHUNK_PAGES))).collect();
        let mut found = flat(profile.small_leaves.as_ref().unwrap());
        found.retain(|page| *page < own);
        assert!(found == expected.into_iter().collect::<Vec<_>>(), "{name}");
        assert!(found.len() < traced_pages, "{name}");
        all.push(profile);
    }
    assert_ne!(all[0].faults, all[1].faults);
}

#[test]
fn groups_contain_touched_pages_in_order_and_pages_read_ahead() {
    let Some(dir) = directory_on_a_medium() else { return };
    let (traces, snapshot) = player(&["sequential-read:128M"], dir.path());
    let profile = recorded(&snapshot, &traces[0].name, &[Part::Groups]);
    let groups = profile.groups.unwrap();
    let memory = snapshot.manifest().layout.pages();
    let all = PageSet::of(groups.iter().flatten(), memory);
    for page in pages(&traces[0].trace, |_| true) {
        assert!(all.get(page), "page {page:#x} was touched");
    }
    // Memory is touched in order: 32,768 pages cannot arrive in two samples, also where the sampler
    // waits for a processor, and the first pages arrive first. The last pages are read ahead early,
    // because the player's own pages follow them.
    assert!(groups.len() >= 3, "{}", groups.len());
    let first = |page: u64| groups.iter().position(|runs| PageSet::of(runs, memory).get(page));
    assert!(first(0).unwrap() < first(24_000).unwrap());
    assert!((profile.faults, profile.written) == (None, None));
}

#[test]
fn groups_of_a_recorded_function_contain_every_touched_page() {
    let Some(dir) = directory_on_a_medium() else { return };
    let (traces, snapshot) = player(&["json-a", "json-b"], dir.path());
    let profile = recorded(&snapshot, "json-b", &[Part::Groups]);
    let all =
        PageSet::of(profile.groups.iter().flatten().flatten(), snapshot.manifest().layout.pages());
    let trace = &traces[1].trace;
    let touched = pages(trace, |_| true);
    let missing = touched.iter().filter(|page| !all.get(**page) && !trace.zero_map().get(**page));
    assert_eq!(missing.count(), 0);
}

#[test]
fn a_failed_recording_leaves_the_profile_unchanged() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let (_, snapshot) = player(&["sequential-read:4M"], dir.path());
    let image = std::fs::OpenOptions::new().write(true).open(snapshot.path().join("memory.img"));
    image.unwrap().write_all_at(&[0xee], 77 * PAGE + 8).unwrap();
    for part in [Part::Groups, Part::Cache] {
        let before = Profile { inputs: vec!["b".into()], ..Profile::default() };
        let mut profile = before.clone();
        let recorder = of(&[part]).remove(0);
        match record(&snapshot, None, recorder, &mut profile) {
            Err(RecordError::PageCache(ProfileRecordError::Check { source, .. })) => {
                assert!(source.to_string().starts_with("page 77 of the image"), "{source}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(profile, before);
    }
}
