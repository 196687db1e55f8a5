//! The tables of the experiments, in Markdown.

use firn_base::format_bytes;
use firn_player::format::{FIRST_TIME_NS, time_class};

use super::outcome::{Outcome, Place};
use super::picture::classes;
use super::replays::Quantity;
use crate::stats::Summary;
use crate::text::{markdown, number, with_interval};
use crate::thaw::{Noise, Row};

/// A column of a table of rows: its head, and its text for a row at a place.
type Column = (&'static str, fn(&Place, &Row) -> String);

const COMMON: [Column; 3] = [
    ("trace", |_, row| row.trace.clone()),
    ("place", |place, _| place.name.clone()),
    ("planner", |_, row| row.planner.clone()),
];
const TOTAL: Column = ("total, ms", |_, row| {
    let mark = if row.oversubscribed { "*" } else { "" };
    format!("{}{mark}", with_interval(&row.total_ms))
});
const FAULTS: Column = ("in page faults, ms", |_, row| optional(row.fault_ms));
const READ_BY_FAULTS: Column =
    ("read by faults", |_, row| row.fault_read_bytes.map_or(String::new(), format_bytes));
/// From this time on FaaSnap's paper calls faults those that read from disk (3.3), ns. The kernel's
/// count of major faults misses those that KVM leaves to a kernel worker.
const SLOW_NS: u64 = 32_000;
const SLOW: Column = ("touches of 32 µs and more", |_, row| {
    let slow = row.touch_times.get(time_class(SLOW_NS, FIRST_TIME_NS)..).unwrap_or_default();
    number(slow.iter().sum())
});
const KVM_FAULTS: Column = ("KVM faults", |_, row| row.kvm_page_faults.to_string());
const OTHERS: [Column; 6] = [
    ("p95", |_, row| number(row.total_ms.p95)),
    FAULTS,
    ("DRAM of a run", |_, row| format_bytes(row.batch_dram_bytes)),
    ("private", |_, row| format_bytes(row.private_bytes)),
    ("read", |_, row| format_bytes(row.read_bytes)),
    KVM_FAULTS,
];
const PARTS: [Column; 3] = [
    ("setup, ms", |_, row| with_interval(&row.start_to_resume_ms)),
    ("invocation, ms", |_, row| with_interval(&row.resume_to_last_page_ms)),
    ("warm, ms", |_, row| optional(row.warm_ms)),
];
const FETCH: [Column; 6] = [
    FAULTS,
    ("fetch, ms", |_, row| optional(row.fetch_ms)),
    ("fetched", |_, row| row.fetch_bytes.map_or(String::new(), format_bytes)),
    READ_BY_FAULTS,
    SLOW,
    KVM_FAULTS,
];
const SPEED_UP: [Column; 2] = [
    ("speed-up", |place, row| Outcome::speed_up(place, row).map_or(String::new(), number)),
    READ_BY_FAULTS,
];

fn optional(summary: Option<Summary>) -> String {
    summary.map_or(String::new(), |summary| with_interval(&summary))
}

/// The columns for a quantity.
fn columns(quantity: Quantity, warm: bool) -> Vec<Column> {
    let more: &[Column] = match quantity {
        Quantity::Parts => &PARTS,
        Quantity::Fetch => &FETCH,
        Quantity::SpeedUp => &SPEED_UP,
        _ => &OTHERS,
    };
    let warm = (warm && quantity != Quantity::Parts).then_some(PARTS[2]);
    COMMON.into_iter().chain([TOTAL]).chain(warm).chain(more.iter().copied()).collect()
}

impl Outcome {
    /// A table in Markdown, with the host and the planners that were left out.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut tables = Vec::new();
        if !self.sessions.is_empty() {
            tables.push(self.sessions_markdown());
        }
        tables.extend(self.histogram_markdown());
        tables.extend(self.programs_markdown());
        tables.extend(self.budgets_markdown());
        tables.extend(self.costs_markdown());
        let mut text = format!(
            "{} ({})\n\n{}\n\n{}",
            self.title,
            self.source,
            self.host.line(),
            tables.join("\n")
        );
        for remark in &self.remarks {
            text.push_str(&format!("\n{remark}\n"));
        }
        if self.unsanitised {
            text.push_str(
                "\nThe pages that the guests held free have content; only the guests of `faasnap` zero what they free.\n",
            );
        }
        for Place { name, noise, .. } in &self.sessions {
            for Noise { planner, trace, of, ratio, .. } in noise {
                text.push_str(&format!(
                    "\nnoise at {name}: {planner} on {trace} measured twice, {of}, second / first: {ratio}\n"
                ));
            }
        }
        for (planner, reason) in &self.left_out {
            text.push_str(&format!("\nleft out: {planner}: {reason}\n"));
        }
        text
    }

    fn rows(&self) -> impl Iterator<Item = (&Place, &Row)> {
        self.sessions.iter().flat_map(|place| place.rows.iter().map(move |row| (place, row)))
    }

    fn sessions_markdown(&self) -> String {
        let warm = self.rows().any(|(_, row)| row.warm_ms.is_some());
        let columns = columns(self.quantity, warm);
        let head: Vec<&str> = columns.iter().map(|(head, _)| *head).collect();
        let rows = self.rows().map(|(place, row)| {
            columns.iter().map(|(_, text)| text(place, row)).collect::<Vec<_>>()
        });
        markdown(&head, &rows.collect::<Vec<_>>())
    }

    /// The touches of a microVM by their time.
    fn histogram_markdown(&self) -> Option<String> {
        if self.quantity != Quantity::FaultTimes {
            return None;
        }
        let count = self.rows().map(|(_, row)| row.touch_times.len()).max()?;
        let rows: Vec<&Row> = self.rows().map(|(_, row)| row).collect();
        let head = std::iter::once("from, µs".to_owned())
            .chain(rows.iter().map(|row| format!("{} on {}", row.planner, row.trace)));
        let head: Vec<String> = head.collect();
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        let lines = classes(count).into_iter().enumerate().map(|(class, name)| {
            let cell =
                |row: &&Row| row.touch_times.get(class).map_or(String::new(), |n| number(*n));
            std::iter::once(name).chain(rows.iter().map(cell)).collect::<Vec<_>>()
        });
        Some(markdown(&head, &lines.collect::<Vec<_>>()))
    }

    fn programs_markdown(&self) -> Option<String> {
        let head = [
            "trace",
            "ranges",
            "offsets into a map, ms",
            "a call for each range, ms",
            "of the total",
            "capturing program, ms",
        ];
        let rows: Vec<Vec<String>> = self
            .programs
            .iter()
            .map(|programs| {
                let row = self.rows().find(|(_, row)| row.trace == programs.trace);
                let share = row.map(|(_, row)| programs.map_ms.median / row.total_ms.median);
                vec![
                    programs.trace.clone(),
                    programs.ranges.to_string(),
                    with_interval(&programs.map_ms),
                    with_interval(&programs.map_each_ms),
                    share.map_or(String::new(), |share| format!("{} %", number(share * 100.0))),
                    with_interval(&programs.attach_ms),
                ]
            })
            .collect();
        (!rows.is_empty()).then(|| markdown(&head, &rows))
    }

    fn budgets_markdown(&self) -> Option<String> {
        let head = ["trace", "budget", "planner", "microVMs", "charged", "copies", "pool", "end"];
        let mut rows = Vec::new();
        for budget in &self.budgets {
            for row in &budget.results {
                let end = row.carried.end.clone();
                rows.push(vec![
                    row.trace.clone(),
                    format_bytes(budget.memory),
                    row.planner.clone(),
                    row.carried.microvms.to_string(),
                    format_bytes(row.carried.usage.total),
                    row.copy_bytes.map_or(String::new(), format_bytes),
                    row.pool_bytes.map_or(String::new(), format_bytes),
                    end.unwrap_or_else(|| "no more were started".to_owned()),
                ]);
            }
        }
        rows.sort_by(|a, b| a[0].cmp(&b[0]));
        (!rows.is_empty()).then(|| markdown(&head, &rows))
    }

    fn costs_markdown(&self) -> Option<String> {
        let head = ["trace", "budget", "pool as", "planner", "cost of each", "to the cheapest"];
        let amount =
            |amount: Option<f64>| amount.map_or(String::new(), |cost| format!("{cost:.4}"));
        let mut rows = Vec::new();
        for priced in &self.costs {
            for row in &priced.costs.costs {
                rows.push(vec![
                    row.trace.clone(),
                    format_bytes(priced.memory),
                    priced.pool_as.clone(),
                    row.planner.clone(),
                    amount(row.of_each),
                    row.to_cheapest.map_or(String::new(), |times| format!("{times:.2}")),
                ]);
            }
        }
        rows.sort_by(|a, b| a[0].cmp(&b[0]));
        (!rows.is_empty()).then(|| markdown(&head, &rows))
    }
}
