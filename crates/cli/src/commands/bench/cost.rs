//! `firn bench cost`: a price on what `firn bench capacity` counted.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use firn_base::{format_bytes, parse_size};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use firn_bench::svg::number;
use firn_bench::{Capacities, CostRow, Prices, costs};

use crate::output;

/// Arguments of `firn bench cost`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench capacity --memory 256M --trace json-a --planner firecracker,pass --pool pool.sock --json capacity.json
  firn bench cost --dram-price 16.61 --pool-price 7.85 capacity.json

A price is that of a GiB, in any currency. The cost of a planner is what its microVMs were charged with, and the copies that were
made for them, at the price of DRAM, and what they used of the pool at the pool's.")]
pub(crate) struct CostArgs {
    /// What `firn bench capacity --json` or `firn bench paper pass-figure-14` wrote
    results: PathBuf,
    /// Price of a GiB of DRAM
    #[arg(long, value_name = "PRICE", value_parser = price)]
    dram_price: f64,
    /// Price of a GiB of the pool's medium
    #[arg(long, value_name = "PRICE", value_parser = price)]
    pool_price: f64,
    /// Price of a GiB of what snapshots lie on that are in no pool
    #[arg(long, value_name = "PRICE", value_parser = price, default_value_t = 0.0, requires = "storage")]
    storage_price: f64,
    /// What a snapshot takes there
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "storage_price")]
    storage: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn price(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(price) if price.is_finite() && price >= 0.0 => Ok(price),
        _ => Err("a price is a number, and not below 0".to_owned()),
    }
}

/// Why there is no cost.
#[derive(Debug, Error)]
pub(crate) enum BenchCostError {
    #[error("reading {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} holds no capacities: `firn bench capacity --json FILE` writes them")]
    Results { path: PathBuf, source: serde_json::Error },
}

/// The results of `firn bench capacity`, or of the paper's figure, which has them in it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Measured {
    Paper { capacities: Capacities },
    Capacity(Capacities),
}

#[derive(Serialize)]
struct Answer {
    prices: Prices,
    costs: Vec<CostRow>,
}

pub(crate) fn run(arguments: &CostArgs) -> Result<ExitCode, BenchCostError> {
    let path = || arguments.results.clone();
    let text = std::fs::read(&arguments.results)
        .map_err(|source| BenchCostError::Read { path: path(), source })?;
    let measured = serde_json::from_slice(&text)
        .map_err(|source| BenchCostError::Results { path: path(), source })?;
    let (Measured::Paper { capacities } | Measured::Capacity(capacities)) = measured;
    let prices = Prices {
        dram: arguments.dram_price,
        pool: arguments.pool_price,
        storage: arguments.storage_price,
    };
    let costs = costs(&capacities, prices, arguments.storage.unwrap_or(0));
    if arguments.json {
        output::json(&Answer { prices, costs });
        return Ok(ExitCode::SUCCESS);
    }
    output::line(&capacities.host.line());
    let rows: Vec<Vec<String>> = costs.iter().map(row).collect();
    let head = [
        "planner",
        "trace",
        "microVMs",
        "DRAM",
        "pool",
        "storage",
        "cost",
        "of each",
        "to the cheapest",
    ];
    output::line(&output::table(&head, &rows));
    output::line(&format!(
        "DRAM: charged to the microVMs, and copies made for them; a GiB of DRAM costs {}, of the pool {}, of storage {}",
        number(prices.dram),
        number(prices.pool),
        number(prices.storage)
    ));
    Ok(ExitCode::SUCCESS)
}

fn row(cost: &CostRow) -> Vec<String> {
    let amount =
        |amount: Option<f64>| amount.map_or(String::new(), |amount| format!("{amount:.4}"));
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
}
