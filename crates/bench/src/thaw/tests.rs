use super::*;

fn subjects(names: &[&str]) -> Vec<Subject> {
    let subject = |name: &&str| Subject {
        planner: (*name).to_owned(),
        preloads: false,
        in_pool: name.starts_with("pass"),
        packs: false,
        ready: false,
        jailed: true,
    };
    names.iter().map(subject).collect()
}

#[test]
fn one_of_several_planners_is_measured_twice() {
    let repeated = |names: &[&str]| Some(to_repeat(&subjects(names))?.planner.clone());
    assert_eq!(repeated(&["pass", "reap", "faast"]).as_deref(), Some("reap"));
    assert_eq!(repeated(&["pass", "pass_shared"]).as_deref(), Some("pass"));
    assert_eq!(repeated(&["reap"]), None);
    assert_eq!(repeated(&["reap", "faast", "reap"]), None);
    assert_eq!(repeated(&[]), None);
}
