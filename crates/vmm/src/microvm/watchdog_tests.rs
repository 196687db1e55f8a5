use super::*;

fn looks(counts: &[(u64, u64)]) -> Vec<bool> {
    let mut vcpu = Watched::default();
    let counts = counts.iter().map(|&(taken, answered)| FaultCounts { taken, answered });
    counts.map(|counts| vcpu.is_stuck(counts)).collect()
}

#[test]
fn a_vcpu_whose_faults_come_to_nothing_is_stuck() {
    assert_eq!(looks(&[(900, 900), (4000, 900), (7000, 900)]), [false, false, true]);
    assert_eq!(looks(&[(3000, 0), (6000, 0)]), [false, true], "from the start");
}

#[test]
fn a_vcpu_that_works_or_waits_is_not() {
    let works = looks(&[(900, 900), (4000, 3950), (7000, 6900), (9000, 6901)]);
    assert_eq!(works, [false; 4]);
    let waits = looks(&[(900, 900), (964, 900), (964, 900), (964, 900)]);
    assert_eq!(waits, [false; 4], "for as many pages as it may");
    let in_between = looks(&[(900, 900), (4000, 900), (4001, 901), (8000, 901), (8000, 901)]);
    assert_eq!(in_between, [false; 5]);
}
