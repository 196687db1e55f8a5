//! `firn bench cost`: the cost of the memory that `firn bench capacity` measured.

use std::path::PathBuf;

use clap::Args;

use firn_base::parse_size;
use firn_bench::{Capacities, Costs, Prices};

use crate::output;

/// Arguments of `firn bench cost`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench capacity --memory 256M --trace json-a --planner firecracker,pass --pool pool.sock --json capacity.json
  firn bench cost --dram-price 16.61 --pool-price 7.85 capacity.json

Prices are for a GiB, in any currency. The cost of a planner is the memory charged to its microVMs plus the copies made for
them, at the price of DRAM, and the memory that they used of the pool, at the pool's price.")]
pub(crate) struct CostArgs {
    /// File that `firn bench capacity --json` wrote
    results: PathBuf,
    /// Price of a GiB of DRAM
    #[arg(long, value_name = "PRICE", value_parser = price)]
    dram_price: f64,
    /// Price of a GiB of the pool's medium
    #[arg(long, value_name = "PRICE", value_parser = price)]
    pool_price: f64,
    /// Price of a GiB of the storage of snapshots that are in no pool
    #[arg(long, value_name = "PRICE", value_parser = price, default_value_t = 0.0, requires = "storage")]
    storage_price: f64,
    /// Storage of a snapshot that is in no pool
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "storage_price")]
    storage: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn price(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(price) if price.is_finite() && price >= 0.0 => Ok(price),
        _ => Err("a price is a number of at least 0".to_owned()),
    }
}

pub(super) fn run(arguments: &CostArgs) -> anyhow::Result<()> {
    let capacities = Capacities::read(&arguments.results)?;
    let prices = Prices {
        dram: arguments.dram_price,
        pool: arguments.pool_price,
        storage: arguments.storage_price,
    };
    let costs = Costs::of(&capacities, prices, arguments.storage.unwrap_or(0));
    if arguments.json {
        output::json(&costs);
    } else {
        output::line(&format!("{}\n{}", capacities.host.line(), costs.text()));
    }
    Ok(())
}
