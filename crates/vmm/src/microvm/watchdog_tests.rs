use super::*;

fn checks(counts: &[(u64, u64)]) -> Vec<bool> {
    let mut vcpu = Watched::default();
    let counts = counts.iter().map(|&(taken, resolved)| FaultCounts { taken, resolved });
    counts.map(|counts| vcpu.is_stuck(counts)).collect()
}

#[test]
fn a_vcpu_whose_faults_are_never_resolved_is_stuck() {
    assert_eq!(checks(&[(900, 900), (4000, 900), (7000, 900)]), [false, false, true]);
    assert_eq!(checks(&[(3000, 0), (6000, 0)]), [false, true], "from the start");
}

#[test]
fn a_vcpu_that_runs_or_waits_is_not_stuck() {
    let running = checks(&[(900, 900), (4000, 3950), (7000, 6900), (9000, 6901)]);
    assert_eq!(running, [false; 4]);
    let waiting = checks(&[(900, 900), (964, 900), (964, 900), (964, 900)]);
    assert_eq!(waiting, [false; 4], "with the most faults in flight");
    let in_between = checks(&[(900, 900), (4000, 900), (4001, 901), (8000, 901), (8000, 901)]);
    assert_eq!(in_between, [false; 5]);
}
