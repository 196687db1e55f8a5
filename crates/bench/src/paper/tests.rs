use firn_memory::planners::parse;

use super::*;
use crate::testing::{sample, well_formed};
use crate::traces::load;

fn outcome(quantity: Quantity, places: &[&str]) -> Outcome {
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
        unsanitised: false,
        order: 1,
        sessions: Vec::new(),
        capacities: None,
        left_out: BTreeMap::new(),
    };
    for place in places {
        outcome.add(place, results());
    }
    outcome
}

#[test]
fn every_experiment_has_a_unique_name_and_known_planners_and_traces() {
    let names: Vec<&str> = EXPERIMENTS.iter().map(|experiment| experiment.name).collect();
    for experiment in EXPERIMENTS {
        assert_eq!(names.iter().filter(|name| **name == experiment.name).count(), 1);
        for planner in experiment.planners {
            assert!(parse(planner).is_ok(), "{}: {planner}", experiment.name);
        }
        for trace in experiment.traces {
            assert!(load(trace).is_ok(), "{}: {trace}", experiment.name);
        }
    }
}

#[test]
fn profiles_are_of_the_same_input_as_in_the_papers() {
    let same = EXPERIMENTS.iter().filter(|experiment| experiment.same_input);
    let same: Vec<&str> = same.map(|experiment| experiment.name).collect();
    let papers =
        ["faasnap-figure-7", "snapbpf-figure-3a", "snapbpf-figure-3b", "snapbpf-figure-3c"];
    assert_eq!(same, papers);
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
