use std::thread::sleep;

use tempfile::tempdir;

use super::*;

#[test]
fn the_kernel_kills_only_while_files_are_read_again() {
    let folder = tempdir().unwrap();
    let (counters, kept) = (folder.path().join("vmstat"), folder.path().join("min_ttl_ms"));
    fs::write(&kept, "0").unwrap();
    let mut thrashing = Thrashing::new(counters.clone(), kept.clone());
    let mut after = |read_again: u64| {
        let text = format!(
            "nr_inactive_file 300\nnr_active_file 500\nworkingset_refault_anon 9\n\
             workingset_refault_file {read_again}\n"
        );
        fs::write(&counters, text).unwrap();
        thrashing.look();
        fs::read_to_string(&kept).unwrap()
    };
    // Nothing is known of the time before.
    assert_eq!(after(10_000), "0");
    assert_eq!(after(10_200), "0");
    assert_eq!(after(10_401), "1000");
    assert_eq!(after(10_700), "1000");
    assert_eq!(after(10_701), "0");
    assert_eq!(after(20_000), "1000");
    sleep(2 * PERIOD);
    assert_eq!(after(30_000), "0");
    assert_eq!(after(40_000), "1000");
    thrashing.calm();
    assert_eq!(fs::read_to_string(&kept).unwrap(), "0");
    fs::write(&counters, "nr_active_file 1\nworkingset_refault_file 50000\n").unwrap();
    thrashing.look();
    assert_eq!(fs::read_to_string(&kept).unwrap(), "1000");
    drop(thrashing);
    assert_eq!(fs::read_to_string(&kept).unwrap(), "0");
}
