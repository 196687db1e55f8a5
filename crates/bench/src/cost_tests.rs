use crate::capacity::{Capacities, CapacityRow, Carried};
use crate::cgroup::GroupUsage;
use crate::testing::sample;

use super::{Prices, costs};

/// The paper's numbers, in GB: DRAM, and the pool's memory if there is one.
fn row(planner: &str, microvms: u32, dram: u64, pool: Option<u64>) -> CapacityRow {
    let usage = GroupUsage { total: dram << 30, ..GroupUsage::default() };
    CapacityRow {
        planner: planner.to_owned(),
        trace: "recognition".to_owned(),
        carried: Carried { microvms, usage, end: None },
        counts: Vec::new(),
        pool_bytes: pool.map(|pool| pool << 30),
        copy_bytes: None,
    }
}

fn capacities(results: Vec<CapacityRow>) -> Capacities {
    let host = sample("pass", "recognition", false).host;
    Capacities { host, memory: 128 << 30, results, left_out: Vec::new() }
}

const PAPER: Prices = Prices { dram: 16.61, pool: 7.85, storage: 0.35 };

#[test]
fn the_papers_ratios_follow_from_its_numbers() {
    // FaaSnap's snapshots are on 512 GB of SSD.
    let of = capacities(vec![row("pass", 200, 48, Some(262)), row("faasnap", 100, 128, None)]);
    let rows = costs(&of, PAPER, 512 << 30);
    assert!((rows[0].total - 2853.98).abs() < 0.01, "{rows:?}");
    assert!((rows[1].total - 2305.28).abs() < 0.01, "{rows:?}");
    assert_eq!(rows[0].to_cheapest, Some(1.0));
    let faasnap = rows[1].to_cheapest.unwrap();
    assert!((1.6..1.65).contains(&faasnap), "{faasnap}");
    // Vanilla's snapshots are on 130 GB of PMEM.
    let of = capacities(vec![row("pass", 200, 48, Some(262)), row("vanilla", 100, 128, None)]);
    let vanilla = costs(&of, Prices { storage: 7.85, ..PAPER }, 130 << 30)[1].to_cheapest.unwrap();
    assert!((2.2..2.25).contains(&vanilla), "{vanilla}");
}

#[test]
fn copies_are_dram_and_no_cost_is_divided_by_zero() {
    let mut with_copies = row("firn", 10, 1, Some(1));
    with_copies.copy_bytes = Some(1 << 30);
    let rows = costs(&capacities(vec![with_copies, row("pass", 0, 1, Some(1))]), PAPER, 1 << 40);
    assert_eq!((rows[0].dram_bytes, rows[0].storage_bytes), (2 << 30, 0));
    assert!((rows[0].total - (2.0 * 16.61 + 7.85)).abs() < 1e-9);
    assert_eq!((rows[1].of_each, rows[1].to_cheapest), (None, None));
    let free = Prices { dram: 0.0, pool: 0.0, storage: 0.0 };
    let rows = costs(&capacities(vec![row("pass", 1, 1, Some(1))]), free, 0);
    assert_eq!((rows[0].of_each, rows[0].to_cheapest), (Some(0.0), None));
}
