use firn_memory::planners::parse;

use super::*;
use crate::capacity::{Capacities, CapacityRow, Carried};
use crate::cgroup::GroupUsage;
use crate::testing::{sample, well_formed};
use crate::traces::{BASE, load};

pub(super) fn outcome(quantity: Quantity, places: &[&str]) -> Outcome {
    let results = || {
        let mut results = sample("firecracker:readahead=on", "json-a", false);
        results.results.extend(sample("pass", "json-a", false).results);
        results
    };
    let mut outcome = Outcome {
        version: 1,
        name: "a-figure".to_owned(),
        source: "A paper <1>".to_owned(),
        title: "A figure".to_owned(),
        quantity,
        host: results().host,
        pool_size: None,
        unsanitised: false,
        order: 1,
        command: "firn bench paper pass-x --runs 1".to_owned(),
        settings: Settings::default(),
        measured: Vec::new(),
        remarks: vec!["A remark.".to_owned()],
        sessions: Vec::new(),
        budgets: Vec::new(),
        costs: Vec::new(),
        programs: Vec::new(),
        kernel_faults: Vec::new(),
        left_out: BTreeMap::new(),
    };
    for place in places {
        outcome.add(place, results());
    }
    outcome
}

/// The parts of all experiments that replay traces.
fn replays() -> impl Iterator<Item = (&'static Experiment, &'static Replays)> {
    EXPERIMENTS.iter().flat_map(|experiment| match &experiment.way {
        Way::Replays(parts) => parts.iter().map(|part| (experiment, part)).collect(),
        _ => Vec::new(),
    })
}

#[test]
fn every_figure_and_table_of_the_papers_is_in_the_table_once() {
    let figures = |paper: &str, kind: &str, names: &[&str]| -> Vec<String> {
        names.iter().map(|name| format!("{paper}-{kind}-{name}")).collect()
    };
    let mut expected = [
        figures("pass", "figure", &["2", "3", "4", "9", "10", "11", "12", "13", "14"]),
        figures("pass", "table", &["1", "2", "5"]),
        vec!["pass-cost".to_owned()],
        figures("faasnap", "figure", &["1", "2", "6", "7", "8", "9", "10", "11"]),
        figures("faasnap", "table", &["3"]),
        figures("snapbpf", "figure", &["3a", "3b", "3c", "4"]),
        vec!["snapbpf-overhead".to_owned()],
        figures("systor", "figure", &["2", "3", "4", "5", "6", "7"]),
        figures("systor", "table", &["3", "4", "5"]),
    ]
    .concat();
    let mut names: Vec<&str> = EXPERIMENTS.iter().map(|experiment| experiment.name).collect();
    expected.sort();
    names.sort_unstable();
    assert_eq!(names, expected);
    let mut files: Vec<String> = EXPERIMENTS.iter().flat_map(Experiment::files).collect();
    let all = files.len();
    files.sort();
    files.dedup();
    assert_eq!(files.len(), all, "no two parts write the same files");
}

#[test]
fn every_experiment_has_known_planners_and_traces() {
    for (Experiment { name, .. }, replays) in replays() {
        for planner in replays.planners {
            assert!(parse(planner).is_ok(), "{name}: {planner}");
        }
        for trace in replays.traces {
            if replays.shape != Shape::Sizes {
                assert!(load(trace).is_ok(), "{name}: {trace}");
                continue;
            }
            for ending in SIZES.map(|(_, ending)| ending).into_iter().chain([BASE]) {
                let sized = format!("{trace}-{ending}");
                assert!(load(&sized).is_ok(), "{name}: {sized}");
            }
        }
        for trace in replays.same_input {
            assert!(replays.traces.contains(trace), "{name}: {trace}");
        }
    }
}

#[test]
fn profiles_are_of_the_same_input_as_in_the_papers() {
    let same = |of: fn(&Replays) -> bool| -> Vec<&str> {
        replays().filter(|(_, replays)| of(replays)).map(|(e, _)| e.name).collect()
    };
    let all = same(|replays| replays.same_input.len() == replays.traces.len());
    let snapbpf = ["figure-3a", "figure-3b", "figure-3c", "figure-4", "overhead"];
    let snapbpf = snapbpf.map(|name| format!("snapbpf-{name}"));
    let expected: Vec<&str> =
        std::iter::once("faasnap-figure-7").chain(snapbpf.iter().map(String::as_str)).collect();
    assert_eq!(all, expected);
    let some = same(|replays| {
        !replays.same_input.is_empty() && replays.same_input.len() < replays.traces.len()
    });
    assert_eq!(some, ["faasnap-figure-1", "faasnap-figure-11"]);
}

#[test]
fn experiments_are_found_by_name_and_paper() {
    let names = |wanted: &[&str]| {
        let wanted: Vec<String> = wanted.iter().map(|name| (*name).to_owned()).collect();
        find(&wanted).map(|found| found.iter().map(|e| e.name).collect::<Vec<_>>())
    };
    let two = names(&["systor-table-3", "pass-cost", "pass-cost"]).unwrap();
    assert_eq!(two, ["pass-cost", "systor-table-3"], "in the order of the table, each once");
    assert_eq!(names(&["systor"]).unwrap().len(), 9);
    assert_eq!(names(&["all"]).unwrap().len(), EXPERIMENTS.len());
    assert_eq!(names(&["pass-figure-99"]), Err(FindError("pass-figure-99".to_owned())));
}

#[test]
fn every_experiment_has_results() {
    for Experiment { name, measured, .. } in &EXPERIMENTS {
        assert!(!measured.is_empty(), "{name}");
    }
}

/// The page of results, whose table is made of [`EXPERIMENTS`].
const PAGE: &str = include_str!("../../../../docs/results/README.md");

#[test]
fn the_page_of_results_has_the_table() {
    assert!(
        PAGE.contains(&document()),
        "docs/results/README.md needs this text:\n\n{}",
        document()
    );
}

#[test]
fn results_of_the_same_settings_host_and_build_are_continued() {
    let mut old = outcome(Quantity::Dram, &["1"]);
    old.settings = Settings { runs: 3, most: None, pool: true };
    old.order = 7;
    old.measured = vec!["json-a by pass".to_owned()];
    let mut new = Outcome { sessions: Vec::new(), order: 8, ..outcome(Quantity::Total, &[]) };
    new.settings = old.settings;
    assert!(old.continues_as(&new, false));
    new.continue_from(old.clone());
    assert_eq!((&new.measured, &new.sessions), (&old.measured, &old.sessions));
    assert_eq!((new.quantity, new.order, &new.host), (Quantity::Total, 7, &old.host));
    for other in [
        Settings { runs: 4, ..old.settings },
        Settings { most: Some(2), ..old.settings },
        Settings { pool: false, ..old.settings },
    ] {
        let new = Outcome { settings: other, ..new.clone() };
        assert!(!old.continues_as(&new, false), "{other:?}");
    }
    let mut built = new.clone();
    built.host.commit = "another".to_owned();
    assert!(!old.continues_as(&built, false));
    let mut moved = new;
    moved.host.medium = "xfs on a disk".to_owned();
    assert!(!old.continues_as(&moved, false));
    assert!(old.continues_as(&moved, true), "the experiment makes its medium");
}

#[test]
fn experiments_that_measure_the_same_share_their_results() {
    let sources = |name: &str| -> Vec<String> {
        let (experiment, part) = replays().find(|(e, _)| e.name == name).unwrap();
        experiment.sources(part)
    };
    assert_eq!(sources("snapbpf-figure-3c"), ["snapbpf-figure-3c", "snapbpf-figure-3b"]);
    assert_eq!(sources("pass-figure-14"), ["pass-figure-14", "pass-cost"]);
    // Its guests time their touches, and those of the others do not.
    assert_eq!(sources("pass-table-5"), ["pass-table-5"]);
    assert_eq!(sources("faasnap-figure-10"), ["faasnap-figure-10"]);
}

#[test]
fn help_and_listing_have_every_name() {
    let (help, listing) = (help(), listing());
    for (Experiment { name, .. }, row) in EXPERIMENTS.iter().zip(&listing) {
        assert!(help.split_whitespace().any(|word| word == *name), "{name}");
        assert_eq!(row[0], *name);
    }
}

#[test]
fn one_place_is_drawn_as_bars_and_several_as_lines() {
    for quantity in [Quantity::Total, Quantity::Dram] {
        let bars = outcome(quantity, &["1"]).draw();
        let lines = outcome(quantity, &["1", "2", "4"]).draw();
        for picture in [&bars, &lines] {
            assert!(well_formed(picture));
            assert!(picture.contains(">pass<") && picture.contains("A paper &lt;1&gt;"));
        }
        assert!(bars.contains(">json-a<"));
        assert!(lines.contains(&format!(">json-a: {}<", quantity.unit())));
    }
}

#[test]
fn parts_and_fetches_have_columns_of_their_own() {
    let mut parts = outcome(Quantity::Parts, &["1"]);
    let time = parts.sessions[0].rows[0].total_ms;
    parts.sessions[0].rows[0].warm_ms = Some(time);
    let (text, picture) = (parts.markdown(), parts.draw());
    for column in ["setup, ms", "invocation, ms", "warm, ms"] {
        assert!(text.contains(column), "{text}");
    }
    assert!(well_formed(&picture) && picture.contains(">firecracker:readahead=on, warm<"));
    assert!(
        picture.contains(">setup<") && picture.contains("A remark.") && text.contains("A remark.")
    );
    let mut fetch = outcome(Quantity::Fetch, &["1"]);
    fetch.sessions[0].rows[0].touch_times = (0..10).map(f64::from).collect();
    let text = fetch.markdown();
    for column in ["in page faults, ms", "fetch, ms", "fetched", "read by faults", "| 17.0 "] {
        assert!(text.contains(column), "{text}");
    }
    assert_eq!(picture::classes(9)[8], "32", "the class from which touches are slow");
    assert!(well_formed(&fetch.draw()));
}

#[test]
fn a_speed_up_is_relative_to_the_first_planner() {
    let mut outcome = outcome(Quantity::SpeedUp, &["1"]);
    outcome.sessions[0].rows[1].total_ms.median /= 2.0;
    for (row, ms) in outcome.sessions[0].rows.iter_mut().zip([3.0, 1.0]) {
        row.measurements = vec![vec![ms]; 11];
    }
    let text = outcome.markdown();
    let speed_up = |planner: &str| {
        let row = text.lines().find(|line| line.contains(&format!("| {planner} ")))?;
        Some(row.split('|').nth(5)?.trim().to_owned())
    };
    let of = ["firecracker:readahead=on", "pass"].map(speed_up);
    assert_eq!(of, [Some("1.00".to_owned()), Some("2.00 (3.00 to 3.00)".to_owned())], "{text}");
    assert!(well_formed(&outcome.draw()));
}

#[test]
fn a_histogram_has_classes_that_double() {
    assert_eq!(picture::classes(5), ["<0.25", "0.25", "0.5", "1", "2"]);
    let mut outcome = outcome(Quantity::FaultTimes, &["1"]);
    for row in &mut outcome.sessions[0].rows {
        row.touch_times = vec![100.0, 0.0, 5.0];
    }
    let (text, picture) = (outcome.markdown(), outcome.draw());
    assert!(text.contains("pass on json-a") && text.contains("| 0.5 "), "{text}");
    assert!(well_formed(&picture) && picture.contains(">&lt;0.25<"), "{picture}");
}

#[test]
fn budgets_are_lines_and_have_prices() {
    let row = |planner: &str, microvms, pool_bytes| CapacityRow {
        planner: planner.to_owned(),
        trace: "json-a".to_owned(),
        carried: Carried {
            microvms,
            usage: GroupUsage { total: 1 << 30, ..GroupUsage::default() },
            end: None,
        },
        counts: Vec::new(),
        pool_bytes,
        copy_bytes: None,
    };
    let mut outcome = outcome(Quantity::Price, &[]);
    for memory in [64 << 20, 128 << 20] {
        for (planner, pool) in [("firecracker", None), ("pass", Some(1 << 30))] {
            let host = outcome.host.clone();
            let of = |microvms| Capacities {
                host: host.clone(),
                memory,
                results: vec![row(planner, microvms, pool)],
                left_out: Vec::new(),
            };
            let median = Capacities::median_of(&[12, 9, 10].map(of)).unwrap();
            assert_eq!(median.results[0].counts, [9, 10, 12]);
            outcome.add_budget(median);
        }
    }
    outcome.price().unwrap();
    let rows: Vec<usize> = outcome.budgets.iter().map(|budget| budget.results.len()).collect();
    assert_eq!((rows, outcome.costs.len()), (vec![2, 2], 4));
    let each = |at: usize, row: usize| outcome.costs[at].costs.costs[row].of_each.unwrap();
    // A GiB of DRAM, and one of the pool, for ten; the snapshot of json takes 256 MiB of the SSD.
    assert!((each(0, 1) - (16.61 + 7.85) / 10.0).abs() < 1e-9);
    assert!((each(1, 1) - 2.0 * 16.61 / 10.0).abs() < 1e-9, "the pool as DRAM");
    assert!((each(0, 0) - (16.61 + 0.35 / 4.0) / 10.0).abs() < 0.001, "{}", each(0, 0));
    let (text, picture) = (outcome.markdown(), outcome.draw());
    assert!(text.contains("cost of each") && text.contains("no more were started"), "{text}");
    assert!(text.contains("10 (9 to 12)"), "{text}");
    assert!(well_formed(&picture) && picture.contains("pool priced as DRAM"));
    outcome.quantity = Quantity::Carried;
    let picture = outcome.draw();
    assert!(well_formed(&picture) && picture.contains(">128 MiB<"));
}

#[test]
fn programs_are_a_share_of_the_total() {
    let mut outcome = outcome(Quantity::Programs, &["1"]);
    let map_ms = crate::Summary::of(&[0.03125]).unwrap();
    outcome.sessions[0].rows[0].total_ms = crate::Summary::of(&[2.0]).unwrap();
    let (map_each_ms, attach_ms) = (map_ms, map_ms);
    let trace = "json-a".to_owned();
    outcome.programs.push(Programs { trace, ranges: 7, map_ms, map_each_ms, attach_ms });
    let text = outcome.markdown();
    assert!(text.contains("| 1.56 % "), "{text}");
    assert!(well_formed(&outcome.draw()));
    let json = serde_json::to_string(&outcome).unwrap();
    assert_eq!(serde_json::from_str::<Outcome>(&json).unwrap(), outcome);
}

#[test]
fn the_kernels_page_faults_are_shares_of_the_total() {
    let mut outcome = outcome(Quantity::KernelFaults, &["1"]);
    let of = |value: f64| crate::Summary::of(&[value]).unwrap();
    let function =
        |name: &str, ms| (name.to_owned(), FunctionTime { calls: of(400.0), ms: of(ms) });
    outcome.kernel_faults.push(KernelFaults {
        trace: "json-a".to_owned(),
        planner: "vanilla_dax".to_owned(),
        total_ms: of(8.0),
        functions: [function("dax", 1.0), function("kvm_mmu_page_fault", 2.0)].into(),
    });
    let text = outcome.markdown();
    let row = |name: &str| text.lines().position(|line| line.contains(name)).unwrap();
    assert!(row("(request to last page)") < row("| kvm_mmu_page_fault "), "{text}");
    assert!(
        row("| kvm_mmu_page_fault ") < row("| dax "),
        "the outer function is the first: {text}"
    );
    assert!(text.contains("| 25.0 % ") && text.contains("| 12.5 % "), "{text}");
    let picture = outcome.draw();
    assert!(well_formed(&picture) && picture.contains(">kvm_mmu_page_fault<"), "{picture}");
    let json = serde_json::to_string(&outcome).unwrap();
    assert_eq!(serde_json::from_str::<Outcome>(&json).unwrap(), outcome);
}

#[test]
fn an_experiment_of_a_dax_file_system_is_refused_on_another() {
    let directory = tempfile::tempdir().unwrap();
    let (experiment, part) = replays().find(|(_, replays)| replays.medium == Medium::Dax).unwrap();
    let config =
        PaperConfig { directory: Some(directory.path().to_owned()), ..PaperConfig::default() };
    let interrupt = crate::Interrupt::catch().unwrap();
    let harness =
        Harness { program: "firn".into(), interrupt: &interrupt, progress: &crate::Quiet };
    let error = config.run(experiment, part, Vec::new(), &harness, |_| {}).unwrap_err();
    let text = error.to_string();
    let path = directory.path().display().to_string();
    assert!(text.contains("DAX") && text.contains(&path) && text.contains("dax-counts"), "{text}");
}

/// Results that are continued are read and written again.
#[test]
fn numbers_keep_their_digits() {
    let mut outcome = outcome(Quantity::Total, &["1"]);
    for median in [13.740239500000001, 0.23609668399617315, 97130.53711048159] {
        outcome.sessions[0].rows[0].total_ms.median = median;
        let json = serde_json::to_string(&outcome).unwrap();
        let again: Outcome = serde_json::from_str(&json).unwrap();
        assert_eq!(serde_json::to_string(&again).unwrap(), json);
    }
}

#[test]
fn a_line_has_a_gap_where_a_planner_was_not_measured() {
    let mut outcome = outcome(Quantity::Total, &["1", "2"]);
    outcome.sessions[1].rows.retain(|row| row.planner != "pass");
    let picture = outcome.draw();
    assert!(well_formed(&picture) && picture.contains(">pass<"));
}

#[test]
fn a_repeated_planner_is_the_noise_of_its_place() {
    let mut results = sample("pass", "json-a", false);
    let mut again = results.results[0].clone();
    results.results[0].label = Some("a".to_owned());
    again.label = Some("b".to_owned());
    results.results.push(again);
    results.noise.push(crate::thaw::Noise {
        planner: "pass".to_owned(),
        trace: "json-a".to_owned(),
        cache: crate::Cache::Cold,
        of: "total_ms".to_owned(),
        ratio: crate::Comparison::of(&[1.5]).unwrap(),
    });
    let mut outcome = outcome(Quantity::Total, &[]);
    outcome.add("8", results);
    assert_eq!((outcome.sessions[0].rows.len(), outcome.sessions[0].noise.len()), (1, 1));
    let text = outcome.markdown();
    assert!(
        text.contains("noise at 8: pass on json-a measured twice, total_ms, second / first: 1.500"),
        "{text}"
    );
}
