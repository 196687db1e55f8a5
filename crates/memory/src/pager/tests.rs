use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use firn_base::PageRange;
use firn_snapshot::{ImageKind, MemoryLayout, MemoryRegion, Profile, Snapshot, set_profile};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::plan::Plan;
use crate::planners::{self, PlanSnapshotError, PlannerError, pack, parse};
use crate::testing::{freeze, frozen_chunk, page_bytes};
use crate::uffd::{Features, RegisterMode};
use crate::{ExecuteError, Executed, GuestMemory, Sources, StepError, compare::compare, execute};

const MIB: u64 = 1 << 20;
/// Pages of guest memory: 3 MiB in one region and 2 MiB in another.
const PAGES: u64 = 1280;
/// Runs of the profile's faults: out of order, adjacent, and over the end of a region.
const FAULTS: [(u64, u64); 6] = [(5, 3), (2, 1), (3, 2), (100, 1), (766, 4), (1240, 40)];
const INSTALLED: u64 = 51;
/// Free pages: two of them were touched by earlier runs.
const FREE: [(u64, u64); 3] = [(600, 50), (768, 2), (1000, 10)];

fn runs<const N: usize>(runs: [(u64, u64); N]) -> Option<Vec<PageRange>> {
    Some(runs.map(|(first, pages)| PageRange { first, pages }).to_vec())
}

struct Fixture {
    dir: TempDir,
}

impl Fixture {
    /// A snapshot with a profile and its packed files.
    fn new(kind: ImageKind) -> Self {
        let fixture = Self { dir: TempDir::new().unwrap() };
        let regions = [(0, 3 * MIB), (8 * MIB, 2 * MIB)];
        let regions = regions.map(|(guest_addr, len)| MemoryRegion { guest_addr, len });
        let layout = MemoryLayout::new(regions.to_vec()).unwrap();
        let booted = GuestMemory::anonymous(layout.clone()).unwrap();
        for page in (0..PAGES).filter(|page| page % 7 != 3) {
            let address = GuestAddress(layout.guest_addr(page * PAGE_SIZE).unwrap());
            booted.vm_memory().write_slice(&page_bytes(page, 5), address).unwrap();
        }
        let path = fixture.path();
        freeze(&booted, &path, kind);
        fixture.set_profile(&fixture.profile());
        fixture.pack("reap");
        fixture.pack("faast");
        fixture
    }

    fn pack(&self, planner: &str) {
        pack(&self.path(), &*parse(planner).unwrap()).unwrap().unwrap();
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("snapshot")
    }

    fn open(&self) -> Snapshot {
        Snapshot::open(self.path()).unwrap()
    }

    fn profile(&self) -> Profile {
        let id = self.open().manifest().description.id;
        Profile { faults: runs(FAULTS), free: runs(FREE), ..Profile::of(id) }
    }

    fn set_profile(&self, profile: &Profile) {
        set_profile(&self.path(), profile).unwrap();
    }

    /// Changes a byte of one of its files.
    fn damage(&self, file: &str, at: u64) {
        let file = OpenOptions::new().read(true).write(true).open(self.path().join(file)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }

    fn refused(&self, planner: &str) -> PlannerError {
        match planners::plan(&self.open(), None, &*parse(planner).unwrap()) {
            Err(PlanSnapshotError::Planner(error)) => error,
            other => panic!("{other:?}"),
        }
    }
}

fn restore(snapshot: &Snapshot, planner: &str) -> Result<Executed, ExecuteError> {
    let plan = planners::plan(snapshot, None, &*parse(planner).unwrap()).unwrap();
    execute(&plan, &Sources { on_failure: |_| (), ..Sources::of(snapshot, None).unwrap() })
}

fn restored(snapshot: &Snapshot, planner: &str) -> GuestMemory {
    restore(snapshot, planner).unwrap().memory
}

fn report(memory: &GuestMemory) -> PagerReport {
    memory.pager().unwrap().report()
}

#[test]
fn reap_installs_the_working_set_in_one_read_and_serves_the_rest_page_by_page() {
    for kind in [ImageKind::Sparse, ImageKind::Dense] {
        let fixture = Fixture::new(kind);
        let snapshot = fixture.open();
        let memory = restored(&snapshot, "reap");
        let installed = report(&memory);
        let packed_bytes = INSTALLED * PAGE_SIZE;
        let direct_reads = 1;
        let expected = PagerReport {
            direct_reads,
            packed_bytes,
            installed_pages: INSTALLED,
            install_wakes: 1,
            ..PagerReport::default()
        };
        assert_eq!(installed, expected);
        assert_eq!(memory.usage().unwrap().private, packed_bytes);
        let compared =
            compare(&memory, snapshot.image_file().unwrap(), snapshot.zero_map()).unwrap();
        assert!(compared.is_equal(), "{compared:?}");
        let copied_bytes = (PAGES - INSTALLED) * PAGE_SIZE;
        let served = PagerReport { faults: PAGES - INSTALLED, copied_bytes, ..expected };
        assert_eq!(report(&memory), served);
    }
}

#[test]
fn granules_take_fewer_faults_and_never_overwrite_present_pages() {
    let fixture = Fixture::new(ImageKind::Dense);
    let snapshot = fixture.open();
    for granule in [4, 16, 64, 512] {
        let memory = restored(&snapshot, &format!("reap:granule={granule}"));
        // Pages that the guest wrote keep their contents, although they lie within granules.
        let view = memory.vm_memory();
        let mine = [6, 100, 767].map(|page| GuestAddress(page * PAGE_SIZE + 8));
        mine.iter().for_each(|address| view.write_obj(77u64, *address).unwrap());
        let compared =
            compare(&memory, snapshot.image_file().unwrap(), snapshot.zero_map()).unwrap();
        assert_eq!(compared.first_differing, [6, 100, 767]);
        let served = report(&memory);
        assert!(served.faults <= (PAGES / granule + 2) + FAULTS.len() as u64, "{served:?}");
        assert_eq!(served.copied_bytes, (PAGES - INSTALLED) * PAGE_SIZE);
    }
}

#[test]
fn a_widened_pager_fills_the_largest_granule_from_then_on() {
    let fixture = Fixture::new(ImageKind::Dense);
    let snapshot = fixture.open();
    let memory = restored(&snapshot, "reap");
    for page in 200..210 {
        memory.vm_memory().read_obj::<u64>(GuestAddress(page * PAGE_SIZE)).unwrap();
    }
    assert_eq!(report(&memory).copied_bytes, 10 * PAGE_SIZE);
    memory.pager().unwrap().widen();
    let compared = compare(&memory, snapshot.image_file().unwrap(), snapshot.zero_map()).unwrap();
    assert!(compared.is_equal(), "{compared:?}");
    // Present pages split a block in two.
    let served = report(&memory);
    assert!(served.faults < 10 + 16, "{served:?}");
    assert_eq!(served.copied_bytes, (PAGES - INSTALLED) * PAGE_SIZE);
}

#[test]
fn faast_maps_zeros_for_free_pages_and_the_image_for_all_others() {
    let fixture = Fixture::new(ImageKind::Dense);
    let snapshot = fixture.open();
    for planner in ["faast", "faast:granule=64"] {
        let memory = restored(&snapshot, planner);
        assert_eq!(report(&memory).installed_pages, INSTALLED - 2);
        let mut zeros = snapshot.zero_map().clone();
        FREE.iter().for_each(|(first, pages)| zeros.insert_range(*first..first + pages));
        let compared = compare(&memory, snapshot.image_file().unwrap(), &zeros).unwrap();
        assert!(compared.is_equal(), "{planner}: {compared:?}");
        let served = report(&memory);
        assert_eq!(served.zero_pages, 0, "the pager does not serve free memory");
        assert_eq!(served.copied_bytes, (PAGES - 62 - (INSTALLED - 2)) * PAGE_SIZE);
    }
}

#[test]
fn discarded_pages_are_zeros_and_a_second_freeze_is_complete() {
    let fixture = Fixture::new(ImageKind::Dense);
    let snapshot = fixture.open();
    for planner in ["reap", "faast", "reap:granule=512"] {
        let memory = restored(&snapshot, planner);
        // Installed, missing, free, and within and across runs of these.
        let mut zeros = snapshot.zero_map().clone();
        for (first, pages) in [(6, 1), (20, 3), (610, 4), (640, 40), (1000, 20)] {
            let address = memory.layout().guest_addr(first * PAGE_SIZE).unwrap();
            memory.discard(address, pages * PAGE_SIZE).unwrap();
            zeros.insert_range(first..first + pages);
        }
        if planner == "faast" {
            FREE.iter().for_each(|(first, pages)| zeros.insert_range(*first..first + pages));
        }
        // A freeze reads the same bytes, without touching missing pages.
        let before = report(&memory);
        let pages = memory.pages();
        for offset in (0..PAGES * PAGE_SIZE).step_by(2 << 20) {
            let frozen = frozen_chunk(&pages, offset, (PAGES * PAGE_SIZE - offset).min(2 * MIB));
            for (page, bytes) in (offset / PAGE_SIZE..).zip(frozen.chunks(4096)) {
                let mut expected = vec![0; 4096];
                if !zeros.get(page) {
                    snapshot
                        .image_file()
                        .unwrap()
                        .read_exact_at(&mut expected, page * PAGE_SIZE)
                        .unwrap();
                }
                assert!(bytes == expected, "{planner}: page {page}");
            }
        }
        assert_eq!(report(&memory), before);
        let compared = compare(&memory, snapshot.image_file().unwrap(), &zeros).unwrap();
        assert!(compared.is_equal(), "{planner}: {compared:?}");
    }
}

/// Accesses a page in a system call, which returns an error where a thread would receive a signal.
fn touch(memory: &GuestMemory, page: u64) -> bool {
    let mut file = tempfile::tempfile().unwrap();
    let view = memory.vm_memory();
    let address = GuestAddress(memory.layout().guest_addr(page * PAGE_SIZE).unwrap());
    view.write_volatile_to(address, &mut file, 4096).is_ok()
}

#[test]
fn a_damaged_page_is_never_mapped() {
    let fixture = Fixture::new(ImageKind::Dense);
    fixture.damage("memory.img", 20 * PAGE_SIZE + 4000);
    let snapshot = fixture.open();
    for (planner, first) in [("reap", 20), ("reap:granule=16", 19)] {
        let memory = restored(&snapshot, planner);
        assert!(touch(&memory, 90));
        assert!(memory.pager().unwrap().failure().is_none());
        assert!(!touch(&memory, first));
        let failure = memory.pager().unwrap().failure().unwrap().to_string();
        assert!(failure.starts_with("page 20 of the image is damaged"), "{failure}");
        // The pager fills no page any more, damaged or not.
        assert!(!touch(&memory, 300));
        assert!(touch(&memory, 90));
    }
}

#[test]
fn an_image_that_shrinks_is_an_error_and_not_zeros() {
    let fixture = Fixture::new(ImageKind::Dense);
    let snapshot = fixture.open();
    let memory = restored(&snapshot, "reap");
    let image = OpenOptions::new().write(true).open(fixture.path().join("memory.img")).unwrap();
    image.set_len(700 * PAGE_SIZE).unwrap();
    assert!(touch(&memory, 699));
    assert!(!touch(&memory, 700));
    let failure = memory.pager().unwrap().failure().unwrap();
    assert!(matches!(failure, PagerError::Truncated { image_page: 700, .. }), "{failure}");
}

#[test]
fn a_damaged_packed_file_is_detected_before_the_guest_runs() {
    let fixture = Fixture::new(ImageKind::Dense);
    fixture.damage("working-set.img", 3 * PAGE_SIZE + 9);
    let refused = restore(&fixture.open(), "reap").unwrap_err();
    let ExecuteError::Step { source: StepError::Install { source, .. }, .. } = refused else {
        panic!("{refused}");
    };
    // The second page of the first run, which holds pages 5 to 7.
    assert!(
        matches!(source, PagerError::Page(DigestError::Mismatch { image_page: 6 })),
        "{source}"
    );
    restore(&fixture.open(), "faast").unwrap();
    // Its table.
    fixture.damage("working-set-used.img", PAGE_SIZE);
    let error = fixture.refused("faast").to_string();
    assert!(error.contains("CRC") && error.contains("firn profile pack"), "{error}");
}

#[test]
fn errors_name_the_command_that_makes_a_missing_or_stale_file() {
    let fixture = Fixture::new(ImageKind::Sparse);
    let profile = fixture.profile();
    fixture.set_profile(&Profile { faults: runs([(1, 1)]), ..profile.clone() });
    for planner in ["reap", "faast"] {
        let error = fixture.refused(planner);
        assert!(matches!(error, PlannerError::OtherPackedFile { .. }), "{error}");
    }
    fixture.set_profile(&Profile { free: runs([(1, 1)]), ..profile.clone() });
    restored(&fixture.open(), "reap");
    let error = fixture.refused("faast");
    assert!(matches!(error, PlannerError::OtherPackedFile { .. }), "{error}");
    fixture.set_profile(&Profile { free: None, ..profile.clone() });
    let error = fixture.refused("faast").to_string();
    assert!(error.contains("firn profile record --part free"), "{error}");
    fixture.set_profile(&Profile { faults: None, ..profile.clone() });
    let error = fixture.refused("reap").to_string();
    assert!(error.contains("firn profile record --part faults"), "{error}");
    pack(&fixture.path(), &*parse("reap").unwrap()).unwrap_err();
    fixture.set_profile(&profile);
    std::fs::remove_file(fixture.path().join("working-set.img")).unwrap();
    let error = fixture.refused("reap").to_string();
    assert!(error.contains("working-set.img") && error.contains("firn profile pack"), "{error}");
    // An empty working set is valid.
    fixture.set_profile(&Profile { faults: Some(Vec::new()), ..profile });
    fixture.pack("reap");
    let snapshot = fixture.open();
    let memory = restored(&snapshot, "reap");
    assert_eq!(report(&memory).installed_pages, 0);
    assert!(
        compare(&memory, snapshot.image_file().unwrap(), snapshot.zero_map()).unwrap().is_equal()
    );
}

#[test]
fn plans_list_the_segments_of_the_pager() {
    let fixture = Fixture::new(ImageKind::Sparse);
    let plan = planners::plan(&fixture.open(), None, &*parse("faast:granule=4").unwrap()).unwrap();
    assert_eq!(
        (plan.pager.as_deref(), plan.planner.as_str()),
        (Some("granule=4"), "faast:granule=4")
    );
    assert_eq!(plan.summary().by_source["zero"], 62 * PAGE_SIZE);
    // Two regions, and three runs of free pages.
    assert_eq!(plan.layers.len(), 5);
    let unnamed = Plan { pager: None, schedule: Vec::new(), ..plan.clone() };
    assert_eq!(unnamed.validate(), Err(crate::PlanError::Pager));
    let other = Plan { pager: Some("granule=3".to_owned()), ..plan.clone() };
    assert!(matches!(other.validate(), Err(crate::PlanError::UnknownPager { .. })));
    let mut late = plan;
    late.schedule[0].when = crate::When::AfterResume;
    assert_eq!(late.validate(), Err(crate::PlanError::Install { index: 0 }));
    for name in ["", "granule=1", "granule=03", "granule=1024", "page=1"] {
        assert_eq!(PagerPolicy::parse(name), None, "{name}");
    }
}

/// Threads touch the same pages while another discards them: every page equals the image or zeros,
/// and no thread hangs.
#[test]
fn many_threads_touch_pages_that_one_discards() {
    let fixture = Fixture::new(ImageKind::Dense);
    let snapshot = fixture.open();
    for planner in ["reap", "reap:granule=64", "faast:granule=16"] {
        let memory = restored(&snapshot, planner);
        std::thread::scope(|scope| {
            for step in [1, 5, 7] {
                let memory = &memory;
                scope.spawn(move || {
                    for page in (0..PAGES).map(|n| n * step % PAGES) {
                        let address = memory.layout().guest_addr(page * PAGE_SIZE).unwrap();
                        let mut bytes = vec![0; 4096];
                        memory.vm_memory().read_slice(&mut bytes, GuestAddress(address)).unwrap();
                        assert!(bytes == page_bytes(page, 5) || bytes == [0; 4096], "page {page}");
                    }
                });
            }
            for page in (0..PAGES).step_by(3) {
                let address = memory.layout().guest_addr(page * PAGE_SIZE).unwrap();
                memory.discard(address, PAGE_SIZE).unwrap();
            }
        });
        assert!(memory.pager().unwrap().failure().is_none());
    }
}

#[test]
fn a_panic_of_the_thread_is_reported_and_leaves_no_zeros() {
    static REPORTED: OnceLock<String> = OnceLock::new();
    let memory = GuestMemory::anonymous(MemoryLayout::for_size(MIB).unwrap()).unwrap();
    let uffd = Uffd::open(Features::REMOVE).unwrap();
    memory.register(&uffd, RegisterMode::MISSING).unwrap();
    let image = tempfile::tempfile().unwrap();
    image.write_all_at(&vec![3; 1 << 20], 0).unwrap();
    let job = PagerJob {
        uffd,
        areas: vec![Area { address: memory.slots()[0].host_addr, len: MIB, image_offset: 0 }],
        store: PageStore::unchecked(image),
        // Fewer pages than the area has: marking page 200 as filled panics.
        pages: 200,
        policy: PagerPolicy::default(),
        on_failure: |error| REPORTED.set(error.to_string()).unwrap(),
    };
    memory.set_pager(Pager::start(job).unwrap());
    assert!(touch(&memory, 199) && touch(&memory, 200));
    // An error, not zeros: the userfaultfd is still open after the failure was reported.
    assert!(!touch(&memory, 5) && !touch(&memory, 201));
    assert_eq!(REPORTED.get().unwrap(), "the pager's thread panicked");
    assert!(matches!(memory.pager().unwrap().failure(), Some(PagerError::Panicked)));
    assert!(touch(&memory, 199), "what is there stays");
}

/// Another process discards memory with `MADV_DONTNEED`, which is reported.
#[test]
fn reported_removals_are_zeros() {
    let memory = GuestMemory::anonymous(MemoryLayout::for_size(MIB).unwrap()).unwrap();
    let uffd = Uffd::open(Features::REMOVE).unwrap();
    memory.register(&uffd, RegisterMode::MISSING).unwrap();
    let image = tempfile::tempfile().unwrap();
    image.write_all_at(&vec![3; 1 << 20], 0).unwrap();
    let area = Area { address: memory.slots()[0].host_addr, len: MIB, image_offset: 0 };
    let job = PagerJob {
        uffd,
        areas: vec![area],
        store: PageStore::unchecked(image),
        pages: 256,
        policy: PagerPolicy::with_granule(16).unwrap(),
        on_failure: |_| (),
    };
    memory.set_pager(Pager::start(job).unwrap());
    let byte =
        |page: u64| memory.vm_memory().read_obj::<u8>(GuestAddress(page * PAGE_SIZE)).unwrap();
    assert_eq!((byte(0), byte(1)), (3, 3));
    // Anonymous memory is discarded in this way.
    memory.discard(PAGE_SIZE, 20 * PAGE_SIZE).unwrap();
    assert_eq!([byte(0), byte(1), byte(20), byte(21)], [3, 0, 0, 3]);
    // Page 1 was filled with page 0, and is now filled alone; 16 to 20 are filled together.
    assert_eq!(report(&memory).zero_pages, 6);
}

#[test]
fn the_packed_files_of_another_snapshot_are_refused() {
    let (one, other) = (Fixture::new(ImageKind::Dense), Fixture::new(ImageKind::Dense));
    let id = |fixture: &Fixture| fixture.open().manifest().description.id;
    let (found, expected) = (id(&one), id(&other));
    for (planner, file) in [("reap", "working-set.img"), ("faast", "working-set-used.img")] {
        let path = other.path().join(file);
        std::fs::copy(one.path().join(file), &path).unwrap();
        let error = other.refused(planner);
        let reason =
            format!("{} was packed from snapshot {found}, this one is {expected}", path.display());
        assert!(
            matches!(&error, PlannerError::PackedFile { reason: found, .. } if found.contains(&reason)),
            "{error}"
        );
        assert!(error.to_string().contains("firn profile pack"), "{error}");
        other.pack(planner);
        planners::plan(&other.open(), None, &*parse(planner).unwrap()).unwrap();
    }
}
