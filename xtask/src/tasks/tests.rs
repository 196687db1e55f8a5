//! The commands of the tasks, for hosts of every kind. They are the commands that the Makefile ran
//! before.

use std::fs;
use std::path::Path;

use super::ALL;
use crate::context::Context;
use crate::host::Host;
use crate::paths::Paths;
use crate::runner::Runner;
use crate::step::Step;

const JSON: &str = "--no-run --message-format=json-render-diagnostics";

fn host(kvm: bool, hardware: bool) -> Host {
    Host { kvm, hardware, disk: true, root: true, cgroup2: true, cpu_limits: true, tun: true }
}

/// A context whose firn is this script.
pub(super) fn context_with_firn(target: &Path, firn: &str) -> Context {
    fs::create_dir_all(target.join("release")).unwrap();
    // A program that this process writes is busy while another test's child inherits it.
    let write = "printf %s \"$2\" >\"$1\"; chmod +x \"$1\"";
    let step = Step::new("sh").args(["-c", write, "sh"]).arg(target.join("release/firn")).arg(firn);
    assert!(step.succeeds().unwrap());
    let paths = Paths::with_target(target.to_owned());
    Context { runner: Runner::new(false, String::new()), host: host(true, false), paths }
}

fn commands(task: &str, host: Host) -> Vec<String> {
    let runner = Runner::new(true, host.required());
    let context = Context { runner, host, paths: Paths::example() };
    let (.., run) = ALL.iter().find(|(name, ..)| *name == task).unwrap();
    run(&context).unwrap();
    context.runner.listed()
}

#[test]
fn test_runs_what_the_host_can_run() {
    let targets =
        |kvm, hardware| commands("test", host(kvm, hardware)).join(", ").replace("make ", "");
    assert_eq!(targets(true, true), "lint, unit-tests, guest-tests");
    assert_eq!(targets(true, false), "lint, unit-tests, lab-and-guest-tests");
    assert_eq!(targets(false, false), "lint, unit-tests, monitor-tests, lab-and-guest-tests");
    assert_eq!(commands("guests", host(true, true)), ["make guest"]);
    assert_eq!(commands("guests", host(true, false)), ["make lab"]);
}

#[test]
fn unit_tests_skip_what_requires_a_kvm_without_one() {
    let all = "cargo test --workspace";
    assert_eq!(commands("unit-tests", host(true, false)), [all]);
    assert_eq!(
        commands("unit-tests", host(false, false)),
        [format!(
            "{all} -- --skip microvm:: --skip player:: --skip floor:: --skip freeze:: \
             --skip tier::emulated:: --skip systor:: --skip vcpu::state"
        )]
    );
}

#[test]
fn monitor_tests_run_modules_and_programs_in_one_lab() {
    let commands = commands("monitor-tests", host(false, false));
    let built = [
        "--workspace --lib",
        "--workspace --lib",
        "--workspace --test bad_profiles",
        "--workspace --test bench",
        "--workspace --test capacity",
        "--workspace --test drift",
        "--workspace --test jail",
        "--workspace --test monitor",
        "--workspace --test network",
        "--workspace --test paged_planners",
        "--workspace --test pager",
        "--workspace --test paper",
        "--workspace --test pool_refusals",
        "--workspace --test profile",
        "--workspace --test signatures",
        "--workspace --test supervisor",
        "--workspace --test thaw",
        "--workspace --test tier",
        "--workspace --test api",
    ];
    assert_eq!(commands.len(), built.len() + 1);
    for (command, built) in commands.iter().zip(built) {
        assert_eq!(*command, format!("cargo test {built} {JSON}"));
    }
    assert_eq!(
        commands[built.len()],
        "/t/release/firn lab run --cpus 1 --timeout 3600 --in firn_vmm --in firn_bench --in bad_profiles \
         --in bench --in capacity --in drift --in jail --in monitor --in network --in paged_planners --in pager --in paper --in pool_refusals --in profile --in signatures --in supervisor --in thaw --in tier --in api \
         --in /t/debug/firn-firecracker \
         --env FIRN_REQUIRE=kvm,root,disk,cpu_limits -- sh -c 'mkdir -p /t/debug; ln -s /bin/firn /bin/firn-monitor /t/debug; \
         ln -s /in/firn-firecracker /t/debug/firn-firecracker; failed=; \
         for program in /in/firn_vmm /in/firn_bench; do $program --test-threads=1 microvm:: player:: floor:: \
         freeze:: tier::emulated:: systor:: vcpu::state || failed=1; done; for program in /in/bad_profiles /in/bench /in/capacity \
         /in/drift /in/jail /in/monitor /in/network /in/paged_planners /in/pager /in/paper /in/pool_refusals /in/profile /in/signatures /in/supervisor /in/thaw /in/tier /in/api; do $program --test-threads=1 || failed=1; done; \
         test -z \"$failed\"'"
    );
}

#[test]
fn lab_tests_run_three_programs() {
    assert_eq!(
        commands("lab-tests", host(true, false)),
        [
            &format!("cargo test --workspace --lib {JSON}"),
            &format!("cargo test --workspace --test lost {JSON}"),
            "cargo test --workspace --test lab --test lab_interrupts --test lab_pool -- --ignored --test-threads=1",
            "/t/release/firn lab run --in firn_memory -- /in/firn_memory --ignored bpf::tests::",
            "/t/release/firn lab run --cpus 1 --fsdax --in lost --env FIRN_REQUIRE=kvm,root,disk,dax -- sh -c \
             'mkdir -p /t/debug; ln -s /bin/firn /bin/firn-monitor /t/debug; /in/lost --test-threads=1'",
        ]
    );
}

#[test]
fn snapbpf_has_its_module() {
    assert_eq!(
        commands("test-snapbpf", host(true, false)),
        [
            &format!("cargo test --workspace --lib {JSON}"),
            &format!("cargo test --workspace --test snapbpf {JSON}"),
            "/t/release/firn lab run --cpus 1 --in firn_memory --in snapbpf --in /c/lab/firn_snapbpf.ko -- sh -c \
             'mkdir -p /t/debug; ln -s /bin/firn /bin/firn-monitor /t/debug; insmod /in/firn_snapbpf.ko; \
             /in/firn_memory --ignored bpf::prefetch && /in/snapbpf --ignored'",
        ]
    );
}

#[test]
fn guest_tests_run_natively_or_in_two_labs() {
    let build = format!("cargo test --workspace --test microvm {JSON}");
    assert_eq!(
        commands("guest-tests", host(true, true)),
        [
            build.as_str(),
            "FIRN=/t/release/firn FIRN_CLONES_IMAGE=/t/clones.erofs FIRN_DRAWS_RUST=/t/debug/draws \
             FIRN_CERTIFICATES=/t/certificates microvm --test-threads=1"
        ]
    );
    assert_eq!(
        commands("long-guest-tests", host(true, true)),
        [
            build.as_str(),
            "FIRN=/t/release/firn FIRN_CLONES_IMAGE=/t/clones.erofs FIRN_DRAWS_RUST=/t/debug/draws \
             FIRN_CERTIFICATES=/t/certificates FIRN_LANGUAGES=/t/languages FIRN_S3_SERVER=/t/versitygw microvm \
             --test-threads=1 --ignored"
        ]
    );
    let lab = |memory, made| {
        format!(
            "/t/release/firn lab run --memory {memory} --fsdax --cpus 1 --timeout 3600 --in microvm --in /c/clients \
             --env FIRN_REQUIRE=kvm,root,dax,cpu_limits,tun --env FIRN=/bin/firn --env FIRN_CLIENTS=/in/clients \
             --in /t/clones.erofs --env FIRN_CLONES_IMAGE=/in/clones.erofs --in /t/debug/draws --env FIRN_DRAWS_RUST=/in/draws \
             --in /t/certificates --env FIRN_CERTIFICATES=/in/certificates{made} -- /in/microvm --test-threads=1"
        )
    };
    let more = " --in /t/languages --env FIRN_LANGUAGES=/in/languages --in /t/versitygw \
                --env FIRN_S3_SERVER=/in/versitygw";
    let (short, long) = (lab("4G", ""), lab("10G", more));
    assert_eq!(
        commands("guest-tests", host(true, false)),
        [
            build.clone(),
            format!(
                "{short} planners:: pool_thaws:: hugetlbfs:: recording:: dax:: \
                 network:: network_clients:: &"
            ),
            format!(
                "{short} --skip planners:: --skip pool_thaws:: --skip hugetlbfs:: --skip recording:: --skip dax:: \
                 --skip network:: --skip network_clients::"
            ),
        ]
    );
    let both = commands("lab-and-guest-tests", host(true, false));
    let beside: Vec<&String> = both.iter().filter(|line| line.ends_with(" &")).collect();
    assert_eq!((both.len(), beside.len()), (8, 4));
    assert!(beside[0].starts_with("cargo test --workspace --test lab ") && both[3] == *beside[0]);
    assert_eq!(
        commands("long-guest-tests", host(true, false)),
        [build, format!("{long} --ignored")]
    );
}

#[test]
fn load_runs_on_players_and_on_guests() {
    let build = format!("cargo test --workspace --test load {JSON}");
    let players = [
        "cargo build --workspace --bin firn --bin firn-monitor --features firn/player-agent".to_owned(),
        "FIRN=/t/player-agent/firn FIRN_PLAYER=1 FIRN_REQUESTS=10000 load --test-threads=1 --nocapture"
            .to_owned(),
    ];
    let native = "FIRN=/t/release/firn FIRN_REQUESTS=1000 load --test-threads=1 --nocapture requests_beside_kills";
    let lab = |seed: u32| {
        format!(
            "/t/release/firn lab run --memory 8G --cpus 1 --timeout 3600 --in load \
             --env FIRN=/bin/firn --env FIRN_REQUESTS=250 --env FIRN_SEED={seed} -- /in/load --test-threads=1 --nocapture requests_beside_kills"
        )
    };
    let all = |last: &[String]| [std::slice::from_ref(&build), &players[..], last].concat();
    assert_eq!(commands("test-load", host(true, true)), all(&[native.to_owned()]));
    assert_eq!(commands("test-load", host(true, false)), all(&[1, 2, 3, 4].map(lab)));
    assert_eq!(commands("test-load", host(false, false)).len(), 5);
    let short = commands("test-load-short", host(true, false));
    assert_eq!(short[..2], [build.clone(), players[0].clone()]);
    let requests = format!(
        "{} requests_beside_kills a_killed_manager without_its_signature",
        players[1].replace("10000", "500")
    );
    assert_eq!(short[2], requests);
}

#[test]
fn workloads_run_natively_or_in_the_lab() {
    let own = std::env::temp_dir().join(format!("own-{}.erofs", std::process::id()));
    let own = own.display().to_string();
    let name = own.rsplit('/').next().unwrap();
    let image = format!(
        "/t/release/firn image build --packages python3-yaml --requirements tests/functions/own_image/requirements.txt \
         --out {own}"
    );
    let microvm = format!("cargo test --workspace --test microvm {JSON}");
    let workloads = format!("cargo test --workspace --test workloads {JSON}");
    assert_eq!(
        commands("test-workloads", host(true, true)),
        [
            microvm.clone(),
            "FIRN=/t/release/firn FIRN_INVOCATIONS=1000 microvm serve::crashes".to_owned(),
            workloads.clone(),
            image.clone(),
            format!(
                "FIRN=/t/release/firn FIRN_FUNCTIONS=/r/guest/functions FIRN_OWN_IMAGE={own} workloads \
                 --test-threads=1 --nocapture"
            ),
        ]
    );
    assert_eq!(
        commands("test-workloads", host(true, false)),
        [
            microvm,
            "/t/release/firn lab run --timeout 3600 --in microvm --env FIRN=/bin/firn --env FIRN_INVOCATIONS=1000 -- \
             /in/microvm serve::crashes"
                .to_owned(),
            workloads,
            image,
            format!(
                "/t/release/firn lab run --timeout 7200 --in workloads --in guest/functions --in {own} \
                 --env FIRN=/bin/firn --env FIRN_FUNCTIONS=/in/functions --env FIRN_OWN_IMAGE=/in/{name} -- \
                 /in/workloads --test-threads=1 --nocapture"
            ),
        ]
    );
}

#[test]
fn bench_measures_what_the_host_can_measure() {
    let build = format!("cargo bench -p firn --bench thaw_growth {JSON}");
    let lab = "/t/release/firn lab run --in thaw_growth --in guest/functions --env FIRN=/bin/firn \
               --env FIRN_FUNCTIONS=/in/functions -- /in/thaw_growth --bench";
    let native = "FIRN=/t/release/firn FIRN_FUNCTIONS=guest/functions thaw_growth --bench";
    let floor = "/t/release/firn bench floor";
    let huge = "/t/release/firn bench floor --leaves 2m";
    let thaw = "/t/release/firn bench thaw --trace sequential-read:64M --runs 10";
    assert_eq!(commands("bench", host(false, false)), [&build, lab]);
    assert_eq!(commands("bench", host(true, false)), [&build, lab, floor, huge, thaw]);
    assert_eq!(commands("bench", host(true, true)), [&build, native, floor, huge, thaw]);
    let user = Host { root: false, ..host(true, true) };
    assert_eq!(commands("bench", user), [&build, native, floor, thaw]);
}
