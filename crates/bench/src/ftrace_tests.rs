use super::*;

/// The files of a tracer, in which `trace` has this text.
fn tracer(trace: &str, current: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for directory in ["options", "per_cpu/cpu0", "per_cpu/cpu1"] {
        fs::create_dir_all(folder.path().join(directory)).unwrap();
    }
    let functions = "dax_iomap_fault.part.0\nkvm_mmu_page_fault [kvm]\nkvm_mmu_page_fault_other\n";
    for (file, text) in [
        ("available_filter_functions", functions),
        ("current_tracer", current),
        ("trace", trace),
        ("per_cpu/cpu0/stats", "entries: 3\noverrun: 0\n"),
        ("per_cpu/cpu1/stats", "entries: 3\noverrun: 0\n"),
    ] {
        fs::write(folder.path().join(file), text).unwrap();
    }
    folder
}

const WANTED: [&[&str]; 2] = [&["kvm_mmu_page_fault"], &["dax_iomap_pte_fault", "dax_iomap_fault"]];
const TRACE: &str = "\
# CPU  DURATION                  FUNCTION CALLS
 1)               |  kvm_mmu_page_fault [kvm]() {
 1)   0.500 us    |    dax_iomap_fault.part.0();
 1) + 12.500 us   |  } /* kvm_mmu_page_fault [kvm] */
 ------------------------------------------
 0)   2.000 us    |  kvm_mmu_page_fault [kvm]();
 0)   ==========> |
 0) ! 100.25 us   |    } /* other */
";

#[test]
fn calls_are_counted_and_their_times_added() {
    let folder = tracer(TRACE, "nop\n");
    let file = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    let graph = FunctionGraph::at(folder.path(), &WANTED).unwrap();
    assert_eq!(file("set_ftrace_filter"), "dax_iomap_fault.part.0 kvm_mmu_page_fault");
    assert_eq!(file("current_tracer"), GRAPH);
    let calls = graph.end().unwrap();
    assert_eq!(calls["kvm_mmu_page_fault"], Calls { count: 2, us: 14.5 });
    assert_eq!(calls["dax_iomap_fault"], Calls { count: 1, us: 0.5 });
    graph.begin().unwrap();
    assert_eq!((file("trace"), file("tracing_on")), (String::new(), "1".to_owned()));
    drop(graph);
    assert_eq!(
        (file("current_tracer"), file("set_ftrace_filter")),
        (NO_TRACER.to_owned(), String::new())
    );
}

#[test]
fn lost_events_and_another_use_are_errors() {
    let folder = tracer(TRACE, "nop\n");
    let graph = FunctionGraph::at(folder.path(), &WANTED).unwrap();
    fs::write(folder.path().join("per_cpu/cpu1/stats"), "overrun: 7\n").unwrap();
    assert!(matches!(graph.end(), Err(FtraceError::Lost(7))));
    drop(graph);
    let folder = tracer(TRACE, "blk\n");
    let error = FunctionGraph::at(folder.path(), &WANTED).unwrap_err();
    assert!(error.to_string().contains("(blk)"), "{error}");
    let current = fs::read_to_string(folder.path().join("current_tracer")).unwrap();
    assert_eq!(current, "blk\n", "another's tracer stays as it is");
    let wanted: [&[&str]; 2] = [&["kvm_mmu_page_fault"], &["no_such"]];
    let error = FunctionGraph::at(folder.path(), &wanted).unwrap_err();
    assert!(matches!(error, FtraceError::NoFunction("no_such")), "{error}");
    let current = fs::read_to_string(folder.path().join("current_tracer")).unwrap();
    assert_eq!(current, "blk\n", "nor where only a part of the functions is there");
    let error = FunctionGraph::at(folder.path(), &[&["no_such"]]).unwrap_err();
    assert!(matches!(error, FtraceError::NoFunction("no_such")), "{error}");
    let error = FunctionGraph::at(Path::new("/none"), &WANTED).unwrap_err();
    assert!(error.to_string().contains("/none/available_filter_functions"), "{error}");
}
