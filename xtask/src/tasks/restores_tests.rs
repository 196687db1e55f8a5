use super::{PLANNERS, SHAPES, Settings, sessions};

fn lines(shapes: &str, pool: Option<&str>) -> Vec<String> {
    let settings = Settings {
        out: "/o".into(),
        traces: vec!["json-a".to_owned()],
        shapes: shapes.split(' ').map(str::to_owned).collect(),
        planners: "reap,faast".to_owned(),
        runs: "3".to_owned(),
        runs_of_ten: "1".to_owned(),
        pool: pool.map(str::to_owned),
    };
    let sessions = sessions(&settings).unwrap();
    sessions.into_iter().map(|session| format!("{}: {}", session.name, session.arguments)).collect()
}

#[test]
fn every_shape_has_its_sessions() {
    let ten = "--cache cold,cached --runs 1 --warm-up 0 --concurrency 10";
    assert_eq!(
        lines(SHAPES, None),
        [
            "json-a.one: --trace json-a --planner reap,faast --dense --unsanitised --cache cold,cached --runs 3".to_owned(),
            "json-a.one-faasnap: --trace json-a --dense --planner faasnap --cache cold,cached --runs 3".to_owned(),
            format!("json-a.ten: --trace json-a --planner reap,faast --dense --unsanitised {ten}"),
            format!("json-a.ten-faasnap: --trace json-a --dense --planner faasnap {ten}"),
            format!("json-a.different: --trace json-a --planner reap,faast --dense --unsanitised {ten} --snapshots different"),
            format!("json-a.different-faasnap: --trace json-a --dense --planner faasnap {ten} --snapshots different"),
            "json-a.sparse: --trace json-a --planner reap,faast,faasnap --cache cold --runs 3".to_owned(),
            "json-a.sanitised: --trace json-a --planner reap,faast,faasnap --cache cold --runs 3 --dense".to_owned(),
        ]
    );
}

#[test]
fn a_pool_serves_all_planners_but_no_sparse_images() {
    assert_eq!(
        lines("ten sparse", Some("/p")),
        [
            "json-a.ten: --trace json-a --planner all --dense --unsanitised --cache cold,cached --runs 1 --warm-up 1 \
             --concurrency 10 --pool /p",
            "json-a.ten-faasnap: --trace json-a --dense --planner faasnap --cache cold,cached --runs 1 --warm-up 1 \
             --concurrency 10 --pool /p",
            "json-a.sparse: --trace json-a --planner reap,faast,faasnap --cache cold --runs 3",
        ]
    );
}

#[test]
fn an_unknown_shape_is_an_error() {
    let settings = Settings {
        out: "/o".into(),
        traces: vec!["json-a".to_owned()],
        shapes: vec!["eleven".to_owned()],
        planners: PLANNERS.to_owned(),
        runs: "1".to_owned(),
        runs_of_ten: "1".to_owned(),
        pool: None,
    };
    let error = sessions(&settings).err().unwrap().to_string();
    assert_eq!(
        error,
        "there is no shape eleven; the shapes are one, ten, different, sparse, sanitised"
    );
}
