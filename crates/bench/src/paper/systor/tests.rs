use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use firn_vmm::{KVM_DEVICE, open_kvm};
use tempfile::TempDir;

use super::experiments::{CLAIMS, Claim, PAPER_FUNCTIONS};
use super::*;
use crate::batch::Interrupt;
use crate::player::MediumModel;
use crate::progress::{Progress, Quiet};
use crate::stats::Summary;
use crate::testing::{REPORT, monitor_program, one_at_a_time, sample, well_formed};
use crate::tier::{DiskParameters, EmulatedDisk, TierMedium};

/// Times of a cell, ms: restoring, connecting, executing, warm.
fn cell(trace: &str, tier: TierName, microvms: u32, times: [f64; 4]) -> Cell {
    let mut row = sample("firecracker:readahead=off", trace, false).results.remove(0);
    let [restoring, connecting, executing, warm] = times;
    let times = Times::by(|time| {
        Summary::of(&[match time {
            Time::Loading => 1.0,
            Time::Restoring => restoring,
            Time::Connecting => connecting,
            Time::Executing => executing,
            Time::Cold => restoring + connecting + executing,
            Time::Warm => warm,
        }])
    });
    row.concurrency = microvms;
    let tier = tier.name().to_owned();
    Cell {
        tier,
        microvms,
        readahead: false,
        pages: 100,
        written: 40,
        period: 3_000_000,
        times,
        row,
    }
}

/// A tier as it could be measured.
fn used(name: TierName) -> TierUse {
    let disk = || TierUse {
        parameters: Some(Parameters::Disk(DiskParameters {
            latency_ns: 180e3,
            read_bandwidth: 500_000_000,
            write_bandwidth: 500_000_000,
            saturating_readers: None,
        })),
        own_latency_ns: Some(14e3),
        own_page_ns: Some(300.0),
        guest_fault: Some(GuestFault { readers: 4, without_ns: 20e3, with_ns: 190e3 }),
        ..TierUse::new(name.name(), Realisation::Emulated, "a <loop>")
    };
    let memory = |latency_ns, in_table_1, how, model| TierUse {
        parameters: Some(Parameters::Memory(MemoryParameters {
            latency_ns,
            read_bandwidth: 6_800_000_000,
            in_table_1,
        })),
        model,
        ..TierUse::new(name.name(), how, "a tmpfs")
    };
    let model = Some(MediumModel { load_ns: 220.0, copy_ns: 644.0 });
    match name {
        TierName::Dram => memory(80.0, true, Realisation::Real, None),
        TierName::Cxl => memory(210.0, false, Realisation::Modelled, model),
        TierName::Dcpm => memory(300.0, true, Realisation::Modelled, model),
        TierName::Nvme | TierName::Ssd => disk(),
    }
}

fn outcome(view: View, cells: Vec<Cell>) -> SystorOutcome {
    SystorOutcome {
        name: "systor".to_owned(),
        source: "SYSTOR".to_owned(),
        title: "A figure".to_owned(),
        view,
        host: sample("p", "t", false).host,
        runs: 1,
        order: 1,
        command: "firn bench paper systor".to_owned(),
        tiers: TierName::ALL.map(used).into(),
        cells,
        noise: Vec::new(),
        left_out: BTreeMap::new(),
    }
}

#[test]
fn every_figure_and_table_of_the_paper_is_an_experiment_of_known_traces() {
    let names: Vec<&str> = systor_experiments().map(|e| e.name).collect();
    for figure in 2..=7 {
        assert!(names.contains(&&*format!("systor-figure-{figure}")), "{figure}");
    }
    for table in 3..=5 {
        assert!(names.contains(&&*format!("systor-table-{table}")), "{table}");
    }
    assert_eq!(names.len(), 9);
    for experiment in systor_experiments() {
        for trace in experiment.functions {
            assert!(load(trace).is_ok(), "{trace}");
            assert!(PAPER_FUNCTIONS.iter().any(|function| function.trace == *trace), "{trace}");
        }
    }
}

#[test]
fn parts_of_cold_add_up_without_the_monitors_start() {
    let runs = [crate::testing::run(&[600_000, 700_000])];
    let row = Cell { times: Times::of(&runs), ..cell("x", TierName::Ssd, 1, [0.0; 4]) };
    let time = |time| row.time(time);
    // The report has no time to connect, so nothing is known of the execution.
    assert_eq!(
        (time(Time::Connecting), time(Time::Executing), time(Time::Warm)),
        (None, None, None)
    );
    let median = |part| time(part).unwrap().median;
    let sum = median(Time::Restoring) + 0.65;
    assert!((median(Time::Cold) - sum).abs() < 1e-9, "{} {sum}", median(Time::Cold));
    assert!(median(Time::Loading) > 0.0 && median(Time::Restoring) > median(Time::Loading));
    let cold = time(Time::Cold).unwrap();
    assert!((cold.max - cold.min - 0.1).abs() < 1e-9, "{cold:?}");
}

#[test]
fn classes_are_by_the_limits_of_the_takeaways() {
    let classes = [1.0, 99.9, 100.0, 500.0, 500.1].map(Class::of_warm);
    assert_eq!(classes, [Class::Light, Class::Light, Class::Mid, Class::Mid, Class::Heavy]);
}

#[test]
fn a_claim_is_compared_with_the_functions_of_its_class() {
    let cells = vec![
        cell("hello-a2", TierName::Nvme, 1, [1.0, 1.0, 2.0, 1.0]),
        cell("hello-a2", TierName::Ssd, 1, [2.0, 8.0, 10.0, 1.0]),
        cell("pyaes-a2", TierName::Nvme, 1, [1.0, 1.0, 2.0, 1.0]),
        cell("pyaes-a2", TierName::Ssd, 1, [2.0, 2.0, 4.0, 1.0]),
        cell("matmul_fb-a2", TierName::Nvme, 1, [1.0, 1.0, 2.0, 1.0]),
        cell("matmul_fb-a2", TierName::Ssd, 2, [9.0, 9.0, 9.0, 1.0]),
    ];
    let claims: Vec<&Claim> = Claim::of(View::Breakdown).collect();
    assert_eq!(claims[0].measured(&cells), Some((2.0, 5.0)));
    // Other numbers of microVMs are not compared.
    assert_eq!(claims[2].measured(&cells), None);
    let text = outcome(View::Breakdown, cells).markdown();
    assert!(text.contains("Light: cold on ssd / cold on nvme"), "{text}");
    assert!(text.contains("agrees in part"), "{text}");
    for claim in CLAIMS {
        assert!(claim.paper.0 <= claim.paper.1, "{}", claim.text());
    }
}

#[test]
fn every_view_is_drawn_and_tabulated_with_the_kind_and_parameters_of_each_tier() {
    for view in [
        View::Breakdown,
        View::Parts,
        View::Cold,
        View::Warm,
        View::Classes,
        View::WorkingSets,
        View::Slowdown,
    ] {
        let mut cells = Vec::new();
        for trace in ["hello-a2", "json_serdes-a2"] {
            for tier in TierName::ALL {
                for microvms in [1, 2] {
                    cells.push(cell(trace, tier, microvms, [1.0, 2.0, 3.0, 4.0]));
                }
            }
        }
        let mut outcome = outcome(view, cells);
        outcome.noise = vec![cell("hello-a2", TierName::Dram, 1, [1.5, 3.0, 4.5, 4.0])];
        let picture = outcome.draw();
        assert!(well_formed(&picture), "{view:?}");
        let text = outcome.markdown();
        for tier in [
            "dram: real (table 1: 80.0 ns, 6.80 GB/s)",
            "cxl: modelled (not from table 1: 210 ns, 6.80 GB/s; 220 ns more a load, 644 ns more a copied page, \
             no limit of bandwidth)",
            "dcpm: modelled (table 1: 300 ns, 6.80 GB/s; 220 ns more a load, 644 ns more a copied page, \
             no limit of bandwidth)",
            "nvme: emulated (table 1: 180 µs, 0.50 GB/s; measured 14.0 µs without delays; each read delayed to this)",
            "ssd: emulated (table 1: 180 µs, 0.50 GB/s; measured 14.0 µs without delays; each read delayed to this)",
            "noise: dram measured twice, second / first: cold 1.50 to 1.50, warm 1.00 to 1.00",
        ] {
            assert!(picture.contains(&format!(">{tier}<")), "{view:?}: {tier}: {picture}");
        }
        for part in [
            "json_serdes",
            "190 with delays (guests at once: 4)",
            "not from table 1: 210 ns, 6.80 GB/s",
            "220 ns more a load, 644 ns more a copied page",
            "noise: dram measured twice",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json = serde_json::to_string(&outcome).unwrap();
        assert!(json.contains(r#""parameters":{"kind":"memory","latency_ns":210.0"#), "{json}");
        assert!(json.contains(r#""parameters":{"kind":"disk","latency_ns":180000.0"#), "{json}");
        assert_eq!(serde_json::from_str::<SystorOutcome>(&json).unwrap(), outcome);
    }
}

#[test]
fn cxl_is_outside_the_papers_set() {
    for experiment in systor_experiments() {
        let alone = experiment.microvms.len() == 1;
        assert_eq!(experiment.tiers.contains(&TierName::Cxl), alone, "{}", experiment.name);
    }
    let names = TierName::ALL.map(|tier| tier.name().parse::<TierName>());
    assert_eq!(names, TierName::ALL.map(Ok));
    let error = "hdd".parse::<TierName>().unwrap_err();
    assert_eq!(
        error.to_string(),
        r#""hdd" is no tier of the experiments: use dram, cxl, dcpm, nvme, ssd"#
    );
}

#[test]
fn as_many_microvms_fit_as_their_images_and_what_they_write() {
    // 80 % of what a host of 24 GiB has available.
    let room = 22_u64 * (1 << 30) / 10 * 8;
    let most = |trace: &str, tier| {
        let trace = load(trace).unwrap().trace;
        let fits = |number: &u32| Candidate::Paper(tier).misfit(&trace, *number, room).is_none();
        [1, 2, 4, 8, 16, 32].into_iter().take_while(fits).last()
    };
    assert_eq!(most("hello-a2", TierName::Ssd), Some(32));
    assert_eq!(most("chameleon-a2", TierName::Nvme), Some(32));
    assert_eq!(most("image_rotate-a2", TierName::Ssd), Some(16));
    assert_eq!(most("cnn_serving-a2", TierName::Ssd), Some(8));
    // tmpfs is its own page cache.
    assert_eq!(most("cnn_serving-a2", TierName::Dcpm), Some(16));
    let trace = load("cnn_serving-a2").unwrap().trace;
    let why = Candidate::Paper(TierName::Ssd).misfit(&trace, 16, room).unwrap();
    assert!(why.contains("of memory, and 17.5 GiB may be used"), "{why}");
}

#[test]
fn a_tier_has_room_for_its_capacity_or_for_what_is_free() {
    let trace = load("hello-a2").unwrap().trace;
    let directory = tempfile::tempdir().unwrap();
    let Some(tier) = disk_tier("small", directory.path(), Some(1 << 30)) else { return };
    let misfit = |tier: &Tier, number| Candidate::Real(tier).misfit(&trace, number, u64::MAX);
    assert_eq!(misfit(&tier, 2), None);
    let why = misfit(&tier, 4).unwrap();
    assert!(why.contains("of the tier, which has 1.0 GiB for snapshots"), "{why}");
    // All of the disk, of which less is free.
    let Some(tier) = disk_tier("all", directory.path(), None) else { return };
    let free = tier.check().unwrap().free;
    let more = u32::try_from(free / (256 << 20) + 1).unwrap();
    assert!(misfit(&tier, more).is_some() && free < tier.capacity);
}

/// A tier that is a directory on a disk; `None` without a disk.
fn disk_tier(name: &str, path: &Path, capacity: Option<u64>) -> Option<Tier> {
    let is_disk = firn_required::is_on_disk(fs::File::open(path).unwrap());
    let medium = TierMedium::Disk { path: path.to_owned() };
    is_disk.then(|| Tier::new(name, medium, capacity, "1".parse().unwrap()).unwrap())
}

/// The steps that a measurement reports.
#[derive(Default)]
struct Seen(RefCell<Vec<String>>);

impl Progress for Seen {
    fn advance(&self, _: u64, step: &str) {
        self.0.borrow_mut().push(step.to_owned());
    }
}

/// The module is named so that the tests that need a KVM are found.
mod player {
    use super::*;

    #[test]
    fn tiers_take_turns_and_one_that_fails_is_left_out() {
        if !firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok()) {
            return;
        }
        let _alone = one_at_a_time();
        let directories = [0; 4].map(|_| tempfile::tempdir().unwrap());
        let [good, other, broken, gone] = &directories;
        let tier = |name, directory: &TempDir| disk_tier(name, directory.path(), None);
        let Some(good) = tier("good", good) else { return };
        let tiers = vec![good, tier("other", other).unwrap(), tier("broken", broken).unwrap()];
        let full = disk_tier("full", other.path(), Some(1 << 20)).unwrap();
        let missing = tier("gone", gone).unwrap();
        fs::remove_dir(gone.path()).unwrap();
        let tiers = tiers.into_iter().chain([full, missing]).collect();
        let programs = tempfile::tempdir().unwrap();
        let log = programs.path().join("log");
        let script = format!(
            "echo $2 >> {}\ncase $2 in {}/*) exit 3 ;; esac\necho '{}'\n",
            log.display(),
            broken.path().display(),
            REPORT.replace('\n', " ")
        );
        let program = monitor_program(programs.path(), &script);
        let interrupt = Interrupt::catch().unwrap();
        let progress = Seen::default();
        let harness = Harness { program, interrupt: &interrupt, progress: &progress };
        let experiment = &FIGURE_7;
        let config = SystorConfig {
            runs: 3,
            functions: vec!["hello-a2".to_owned()],
            most: 1,
            only: vec![TierName::Dram],
            tiers,
            order: Some(1),
        };
        let outcome = config.run(experiment, &[], &harness, |_| {}).unwrap();
        let cells: Vec<_> = outcome.cells.iter().map(|c| (&*c.tier, c.readahead)).collect();
        let of = |tier| [(tier, false), (tier, true)];
        assert_eq!(cells, [of("good"), of("other")].concat());
        let noise: Vec<_> = outcome.noise.iter().map(|c| (&*c.tier, c.readahead)).collect();
        assert_eq!(noise, of("good"));
        assert!(outcome.cells.iter().all(|cell| cell.row.runs == 3));
        let why = |what: &str| outcome.left_out[what].as_str();
        assert!(why("hello on broken with 1 microVM").contains("failed on hello-a2 in run 1"));
        assert!(why("hello on full with 1 microVM").contains("of the tier, which has 1.0 MiB"));
        assert!(why("gone").contains("is missing"), "{:?}", outcome.left_out);
        assert_eq!(outcome.left_out.len(), 3, "{:?}", outcome.left_out);
        let command = "firn bench paper systor-figure-7 --runs 3 --only dram \
            --tier good,other,broken,full,gone --trace hello-a2 --most 1";
        assert_eq!((outcome.order, &*outcome.command), (1, command));
        // Each run has every cell once, and the first tier's twice.
        let steps = progress.0.borrow();
        assert_eq!(steps.len(), 3 * 6);
        let mut orders: Vec<&[String]> = steps.chunks(6).collect();
        for order in &orders {
            let of = |tier: &str| order.iter().filter(|step| step.contains(tier)).count();
            assert_eq!((of("good"), of("other")), (4, 2), "{order:?}");
        }
        orders.dedup();
        assert!(orders.len() > 1, "{steps:?}");
        // Nothing is left on the tiers, and nothing is measured a second time.
        for directory in &directories[..3] {
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        }
        let config = SystorConfig { tiers: config.tiers[..2].to_vec(), ..config };
        let started = fs::read_to_string(&log).unwrap();
        let known = [outcome];
        let again = config.run(experiment, &known, &harness, |_| {}).unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), started);
        assert_eq!((&again.cells, &again.noise), (&known[0].cells, &known[0].noise));
        assert_eq!(again.tiers, known[0].tiers[..2]);
        drop(steps);
        // Another order is another measurement.
        let config = SystorConfig { order: Some(2), ..config };
        let other = config.run(experiment, &known, &harness, |_| {}).unwrap();
        assert_eq!(other.order, 2);
        assert_ne!(fs::read_to_string(&log).unwrap(), started);
    }

    /// Fills a tier when a function's measurements begin.
    struct Filling<'a>(&'a Path);

    impl Progress for Filling<'_> {
        fn note(&self, _: &str) {
            let mut file = fs::File::create(self.0.join("others")).unwrap();
            let full = std::io::copy(&mut std::io::repeat(1), &mut file).unwrap_err();
            assert_eq!(full.kind(), ErrorKind::StorageFull);
        }
    }

    #[test]
    fn a_tier_that_fills_before_a_freeze_is_left_out_and_keeps_nothing() {
        let has_kvm = firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok());
        let root = firn_required::has("root", rustix::process::geteuid().is_root());
        if !has_kvm || !root {
            return;
        }
        let Ok(disk) = EmulatedDisk::make(512 << 20) else { return };
        let _alone = one_at_a_time();
        let content = || {
            let names = fs::read_dir(disk.path()).unwrap().map(|entry| entry.unwrap().file_name());
            names.collect::<BTreeSet<_>>()
        };
        let before = content();
        let tier = disk_tier("filling", disk.path(), None).unwrap();
        let programs = tempfile::tempdir().unwrap();
        let program = monitor_program(programs.path(), &format!("echo '{REPORT}'\n"));
        let interrupt = Interrupt::catch().unwrap();
        let progress = Filling(disk.path());
        let harness = Harness { program, interrupt: &interrupt, progress: &progress };
        let config = SystorConfig {
            runs: 1,
            functions: vec!["hello-a2".to_owned()],
            most: 1,
            only: vec![TierName::Dram],
            tiers: vec![tier],
            order: None,
        };
        let outcome = config.run(&FIGURE_7, &[], &harness, |_| {}).unwrap();
        let why = &outcome.left_out["hello on filling with 1 microVM"];
        assert!(why.contains("No space left on device"), "{why}");
        assert!(outcome.cells.is_empty());
        let mut after = content();
        assert!(after.remove(OsStr::new("others")));
        assert_eq!(after, before);
    }

    #[test]
    fn an_emulated_disk_whose_delays_do_not_hold_is_left_out() {
        let has_kvm = firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok());
        let root = firn_required::has("root", rustix::process::geteuid().is_root());
        // zram is a property of the host that nothing else here needs.
        if !has_kvm || !root || EmulatedDisk::make(64 << 20).is_err() {
            return;
        }
        let _alone = one_at_a_time();
        let programs = tempfile::tempdir().unwrap();
        // Players that read nothing, and say that they have read 64 MiB.
        let report = REPORT.replace('\n', " ").replace(r#""pages":10,"#, r#""pages":16384,"#);
        let program = monitor_program(programs.path(), &format!("echo '{report}'\n"));
        let interrupt = Interrupt::catch().unwrap();
        let harness = Harness { program, interrupt: &interrupt, progress: &Quiet };
        let config = SystorConfig {
            runs: 1,
            functions: vec!["hello-a2".to_owned()],
            most: 1,
            only: vec![TierName::Ssd],
            ..SystorConfig::default()
        };
        let outcome = config.run(&FIGURE_4, &[], &harness, |_| {}).unwrap();
        let why = &outcome.left_out["ssd"];
        assert!(why.contains("delays do not hold for guests: 16384 reads took"), "{why}");
        assert!(outcome.cells.is_empty() && outcome.tiers.is_empty());
    }
}

#[test]
fn cells_of_another_number_or_tier_are_not_used_again() {
    let cells = vec![cell("hello-a2", TierName::Ssd, 1, [1.0, 2.0, 3.0, 4.0])];
    let outcome = outcome(View::Breakdown, cells);
    let at = At { trace: "hello-a2", tier: "ssd", microvms: 1, readahead: false };
    assert!(find(&[&outcome], at).is_some());
    for other in [
        At { microvms: 2, ..at },
        At { tier: "nvme", ..at },
        At { trace: "pyaes-a2", ..at },
        At { readahead: true, ..at },
    ] {
        assert!(find(&[&outcome], other).is_none());
    }
}

#[test]
fn tables_of_documents_have_a_column_for_each_tier() {
    let mut cells = Vec::new();
    for (factor, microvms) in [(1.0, 1), (3.0, 4)] {
        for (trace, cold) in [("hello-a2", 10.0), ("pyaes-a2", 40.0)] {
            cells.push(cell(trace, TierName::Ssd, microvms, [0.0, 0.0, cold * factor, 5.0]));
        }
    }
    cells.push(Cell { readahead: true, ..cells[0].clone() });
    let outcome = outcome(View::Breakdown, cells);
    let table = outcome.by_tier("cold", None).unwrap();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let of_ssd = |row: usize| rows[row][rows[row].len() - 2..].to_vec();
    assert_eq!(of_ssd(0), ["ssd", "ssd with read-ahead"]);
    assert_eq!((rows[0][1], rows.len()), ("microVMs", 6));
    assert_eq!((&rows[2][..2], of_ssd(2)), (&["hello", "1"][..], vec!["10.0", "10.0"]));
    assert_eq!((&rows[5][..2], of_ssd(5)), (&["pyaes", "4"][..], vec!["120", ""]));
    let one = outcome.by_tier("slowdown", Some("pyaes chameleon")).unwrap();
    assert!(one.contains("| 8.00 ") && one.contains("| 24.0 ") && !one.contains("hello"), "{one}");
    assert!(outcome.by_tier("lukewarm", None).is_none());
    assert!(outcome.by_tier("cold", Some("chameleon")).is_none());
    assert!(outcome.by_tier("host", None).unwrap().contains("1 runs; seed 1"));
}
