use super::experiments::{CLAIMS, Claim, PAPER_FUNCTIONS};
use super::*;
use crate::testing::{sample, well_formed};

/// Times of a cell, ms: restoring, connecting, executing, warm.
fn cell(trace: &str, tier: TierName, microvms: u32, times: [f64; 4]) -> Cell {
    let mut row = sample("firecracker:readahead=off", trace, false).results.remove(0);
    let [restoring, connecting, executing, warm] = times;
    let all = |median| crate::stats::Summary::of(&[median]);
    row.process_start_ms = all(1.0);
    row.start_to_resume_ms = all(1.0 + restoring).unwrap();
    row.connect_ms = all(connecting);
    row.resume_to_last_page_ms = all(connecting + executing).unwrap();
    row.total_ms = all(1.0 + restoring + connecting + executing).unwrap();
    row.warm_ms = all(warm);
    let tier = tier.name().to_owned();
    Cell { tier, microvms, readahead: false, pages: 100, written: 40, row }
}

fn outcome(view: View, cells: Vec<Cell>) -> SystorOutcome {
    let used = |name: TierName| TierUse {
        name: name.name().to_owned(),
        how: Realisation::Emulated,
        description: "a <loop>".to_owned(),
        parameters: None,
        own_latency_ns: Some(14e3),
        throttle: None,
        guest_fault_ns: Some((20e3, 190e3)),
        model: None,
    };
    SystorOutcome {
        name: "systor".to_owned(),
        source: "SYSTOR".to_owned(),
        title: "A figure".to_owned(),
        view,
        host: sample("p", "t", false).host,
        runs: 1,
        again: AGAIN,
        connect: 7,
        tiers: [TierName::Nvme, TierName::Ssd].map(used).into(),
        cells,
        left_out: BTreeMap::new(),
    }
}

#[test]
fn every_figure_and_table_of_the_paper_is_an_experiment_of_known_traces() {
    let names: Vec<&str> = SYSTOR_EXPERIMENTS.iter().map(|e| e.name).collect();
    for figure in 2..=7 {
        assert!(names.contains(&&*format!("systor-figure-{figure}")), "{figure}");
    }
    for table in 3..=5 {
        assert!(names.contains(&&*format!("systor-table-{table}")), "{table}");
    }
    assert_eq!((names.len(), find_systor("systor").len()), (9, 9));
    assert_eq!((find_systor("systor-table-3").len(), find_systor("pass-table-1").len()), (1, 0));
    for experiment in SYSTOR_EXPERIMENTS {
        for trace in experiment.functions {
            assert!(load(trace).is_ok(), "{trace}");
            assert!(PAPER_FUNCTIONS.iter().any(|function| function.trace == *trace), "{trace}");
        }
    }
}

#[test]
fn parts_of_cold_add_up_without_the_monitors_start() {
    let hello = cell("hello-a", TierName::Nvme, 1, [2.0, 3.0, 4.0, 5.0]);
    assert_eq!(hello.time(Time::Executing), None);
    let cell = cell("json_serdes-a", TierName::Nvme, 1, [2.0, 3.0, 4.0, 5.0]);
    let time = |time| cell.time(time).unwrap();
    let parts = [Time::Loading, Time::Restoring, Time::Connecting, Time::Executing].map(time);
    assert_eq!(parts, [1.0, 2.0, 3.0, 4.0]);
    assert_eq!((time(Time::Cold), time(Time::Warm)), (9.0, 5.0));
}

#[test]
fn classes_are_by_the_limits_of_the_takeaways() {
    let classes = [1.0, 99.9, 100.0, 500.0, 500.1].map(Class::of_warm);
    assert_eq!(classes, [Class::Light, Class::Light, Class::Mid, Class::Mid, Class::Heavy]);
}

#[test]
fn a_claim_is_compared_with_the_functions_of_its_class() {
    let cells = vec![
        cell("hello-a", TierName::Nvme, 1, [1.0, 1.0, 2.0, 1.0]),
        cell("hello-a", TierName::Ssd, 1, [2.0, 8.0, 10.0, 1.0]),
        cell("pyaes-a", TierName::Nvme, 1, [1.0, 1.0, 2.0, 1.0]),
        cell("pyaes-a", TierName::Ssd, 1, [2.0, 2.0, 4.0, 1.0]),
        cell("matmul_fb-a", TierName::Nvme, 1, [1.0, 1.0, 2.0, 1.0]),
        cell("matmul_fb-a", TierName::Ssd, 2, [9.0, 9.0, 9.0, 1.0]),
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
fn every_view_is_drawn_and_tabulated() {
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
        for trace in ["hello-a", "json_serdes-a"] {
            for tier in [TierName::Nvme, TierName::Ssd] {
                for microvms in [1, 2] {
                    cells.push(cell(trace, tier, microvms, [1.0, 2.0, 3.0, 4.0]));
                }
            }
        }
        let outcome = outcome(view, cells);
        let picture = outcome.draw();
        assert!(well_formed(&picture), "{view:?}");
        assert!(picture.contains("nvme emulated, ssd emulated"), "{view:?}");
        let text = outcome.markdown();
        assert!(text.contains("json_serdes") && text.contains("190 with limits"), "{text}");
        let json = serde_json::to_string(&outcome).unwrap();
        assert_eq!(serde_json::from_str::<SystorOutcome>(&json).unwrap(), outcome);
    }
}

#[test]
fn cells_of_another_scale_or_tier_are_not_used_again() {
    let cells = vec![cell("hello-a", TierName::Ssd, 1, [1.0, 2.0, 3.0, 4.0])];
    let outcome = outcome(View::Breakdown, cells);
    let at = At { trace: "hello-a", tier: "ssd", microvms: 1, readahead: false };
    assert!(find(&[&outcome], at, false).is_some());
    // The limits of an SSD on which several microVMs start are others.
    assert!(find(&[&outcome], at, true).is_none());
    for other in [
        At { microvms: 2, ..at },
        At { tier: "nvme", ..at },
        At { trace: "pyaes-a", ..at },
        At { readahead: true, ..at },
    ] {
        assert!(find(&[&outcome], other, false).is_none());
    }
}
