//! The cost of a microVM's memory (PASS 5.3, "Cost-effectiveness").
//!
//! The paper multiplies the amount of each kind of memory in a host by the price of that kind, and
//! divides by the number of microVMs: PASS with 48 GB of DRAM and 262 GB of PMEM carries twice as
//! many as FaaSnap with 128 GB of DRAM and 512 GB of SSD. This module does the same with the
//! numbers of [`Capacities`] and with prices of the user's choice.

use firn_base::format_bytes;
use serde::{Deserialize, Serialize};

use crate::capacity::Capacities;
use crate::text::{number, table};

const GIB: f64 = (1 << 30) as f64;

/// Prices of a GiB, in any currency.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prices {
    /// DRAM.
    pub dram: f64,
    /// The pool's medium.
    pub pool: f64,
    /// The storage of snapshots that are in no pool.
    pub storage: f64,
}

/// The cost of the memory of a budget's microVMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostRow {
    /// The planner, with all its options.
    pub planner: String,
    /// The trace.
    pub trace: String,
    /// MicroVMs that ran at the same time.
    pub microvms: u32,
    /// Bytes of DRAM: those charged to them, and the copies that a pool's manager made for them.
    pub dram_bytes: u64,
    /// Bytes of the pool that they used.
    pub pool_bytes: u64,
    /// Bytes of storage of their snapshot, if it is in no pool.
    pub storage_bytes: u64,
    /// Cost of all of it.
    pub total: f64,
    /// Cost of each microVM; `None` without microVMs.
    pub of_each: Option<f64>,
    /// `of_each` divided by that of the cheapest planner on the trace.
    pub to_cheapest: Option<f64>,
}

/// The costs of all rows of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// The prices.
    pub prices: Prices,
    /// One for each row of the measurement.
    pub costs: Vec<CostRow>,
}

impl Costs {
    /// The costs of a measurement; `storage` is the bytes of a snapshot that is in no pool.
    #[must_use]
    pub fn of(capacities: &Capacities, prices: Prices, storage: u64) -> Self {
        Self { prices, costs: costs(capacities, prices, storage) }
    }

    /// A table, with the prices.
    #[must_use]
    pub fn text(&self) -> String {
        const HEAD: [&str; 9] = [
            "planner",
            "trace",
            "microVMs",
            "DRAM",
            "pool",
            "storage",
            "cost",
            "cost of each",
            "relative to cheapest",
        ];
        let amount =
            |amount: Option<f64>| amount.map_or(String::new(), |amount| format!("{amount:.4}"));
        let row = |cost: &CostRow| {
            vec![
                cost.planner.clone(),
                cost.trace.clone(),
                cost.microvms.to_string(),
                format_bytes(cost.dram_bytes),
                format_bytes(cost.pool_bytes),
                format_bytes(cost.storage_bytes),
                amount(Some(cost.total)),
                amount(cost.of_each),
                cost.to_cheapest.map_or(String::new(), |times| format!("{times:.2}")),
            ]
        };
        let rows: Vec<Vec<String>> = self.costs.iter().map(row).collect();
        format!(
            "{}\nDRAM: charged to the microVMs, and copies made for them; prices of a GiB: DRAM {}, pool {}, storage {}",
            table(&HEAD, &rows),
            number(self.prices.dram),
            number(self.prices.pool),
            number(self.prices.storage)
        )
    }
}

fn costs(capacities: &Capacities, prices: Prices, storage: u64) -> Vec<CostRow> {
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
