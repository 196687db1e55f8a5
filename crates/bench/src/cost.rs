//! What the memory of a microVM costs (PASS 5.3, "Cost-effectiveness").
//!
//! The paper multiplies what a host uses of each kind of memory by the price of that kind, and compares hosts by microVMs: PASS
//! with 48 GB of DRAM and 262 GB of PMEM carries twice as many as FaaSnap with 128 GB of DRAM and 512 GB of SSD. Here it is
//! the same, with what [`Capacities`] counted and with prices that the user names.

use serde::{Deserialize, Serialize};

use crate::capacity::Capacities;

const GIB: f64 = (1 << 30) as f64;

/// What a GiB costs, in any currency.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prices {
    /// Of DRAM.
    pub dram: f64,
    /// Of the pool's medium.
    pub pool: f64,
    /// Of what the snapshots of planners without a pool lie on.
    pub storage: f64,
}

/// What the memory of a budget's microVMs costs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostRow {
    /// The planner, with all its options.
    pub planner: String,
    /// The trace.
    pub trace: String,
    /// MicroVMs that there were, all at once.
    pub microvms: u32,
    /// Bytes of DRAM: what was charged to them, and the copies that a pool's manager made for them.
    pub dram_bytes: u64,
    /// Bytes of the pool that they used.
    pub pool_bytes: u64,
    /// Bytes that their snapshot takes where it is in no pool.
    pub storage_bytes: u64,
    /// What all of that costs.
    pub total: f64,
    /// The same for each microVM; none where there was no microVM.
    pub of_each: Option<f64>,
    /// How many times that of the cheapest planner on the trace it is.
    pub to_cheapest: Option<f64>,
}

/// The costs of all rows of a measurement; `storage` is the bytes that the snapshot takes for planners without a pool.
#[must_use]
pub fn costs(capacities: &Capacities, prices: Prices, storage: u64) -> Vec<CostRow> {
    let rows = capacities.results.iter().map(|row| {
        let dram_bytes = row.carried.usage.total + row.copy_bytes.unwrap_or(0);
        let (pool_bytes, storage_bytes) = match row.pool_bytes {
            Some(bytes) => (bytes, 0),
            None => (0, storage),
        };
        let parts =
            [(dram_bytes, prices.dram), (pool_bytes, prices.pool), (storage_bytes, prices.storage)];
        let total = parts.iter().map(|(bytes, price)| *bytes as f64 / GIB * price).sum();
        let microvms = row.carried.microvms;
        CostRow {
            planner: row.planner.clone(),
            trace: row.trace.clone(),
            microvms,
            dram_bytes,
            pool_bytes,
            storage_bytes,
            total,
            of_each: (microvms > 0).then(|| total / f64::from(microvms)),
            to_cheapest: None,
        }
    });
    let mut rows: Vec<CostRow> = rows.collect();
    let cheapest = |trace: &str, rows: &[CostRow]| {
        rows.iter().filter(|row| row.trace == trace).filter_map(|row| row.of_each).reduce(f64::min)
    };
    for at in 0..rows.len() {
        let least = cheapest(&rows[at].trace, &rows).filter(|least| *least > 0.0);
        rows[at].to_cheapest = rows[at].of_each.zip(least).map(|(own, least)| own / least);
    }
    rows
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
