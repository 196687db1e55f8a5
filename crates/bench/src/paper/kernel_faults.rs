//! Time of a start in the kernel's functions for page faults (PASS 2.5, table 2).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::batch::Interrupt;
use crate::cache::Cache;
use crate::ftrace::{Calls, FtraceError, FunctionGraph};
use crate::host::{Host, KvmKind};
use crate::stats::Summary;
use crate::thaw::{Session, SessionError, Turn};

/// The paper's two events. The second happens within the first one. Where a compiler has merged
/// `dax_iomap_pte_fault` into its caller, that one is timed, which also has the faults of 2 MiB.
const FUNCTIONS: [&[&str]; 2] =
    [&["kvm_mmu_page_fault"], &["dax_iomap_pte_fault", "dax_iomap_fault"]];

/// The time of one function's start in the kernel's page faults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelFaults {
    /// The trace.
    pub trace: String,
    /// The planner.
    pub planner: String,
    /// Request to last page while the kernel traced its functions, which takes some time.
    pub total_ms: Summary,
    /// The kernel's functions, by name.
    pub functions: BTreeMap<String, FunctionTime>,
}

/// The time in a function of the kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionTime {
    /// Calls in a run.
    pub calls: Summary,
    /// Their time in a run.
    pub ms: Summary,
}

/// The unit of these times on a host. The lab counts instructions, and its clock has a ms for each
/// million of them (`firn lab run --icount`).
pub(super) fn unit(host: &Host) -> &'static str {
    if host.kvm == KvmKind::Lab { "million instructions" } else { "ms" }
}

/// Why the time in the kernel's functions is not known.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelFaultsError {
    /// The kernel's functions cannot be timed.
    #[error(transparent)]
    Ftrace(#[from] FtraceError),
    /// A run failed.
    #[error(transparent)]
    Session(#[from] SessionError),
}

impl KernelFaults {
    /// Measures each subject of a session on each of its players, with one microVM at a time.
    pub(super) fn measure(
        session: &Session,
        host: &Host,
        cache: Cache,
        interrupt: &Interrupt,
    ) -> Result<Vec<Self>, KernelFaultsError> {
        let graph = FunctionGraph::new(&FUNCTIONS)?;
        let mut all = Vec::new();
        for player in &session.players {
            for subject in &session.subjects {
                // What the guest would touch for its checks is not of the invocation.
                let turn = Turn { player, subject, cache, run: 1, unchecked: true };
                all.push(Self::of(&graph, session, turn, host, interrupt)?);
            }
        }
        Ok(all)
    }

    fn of(
        graph: &FunctionGraph,
        session: &Session,
        turn: Turn<'_>,
        host: &Host,
        interrupt: &Interrupt,
    ) -> Result<Self, KernelFaultsError> {
        let mut runs = Vec::new();
        let mut calls: BTreeMap<&str, Vec<Calls>> = BTreeMap::new();
        for run in 1..=session.runs {
            graph.begin()?;
            runs.push(session.turn(&Turn { run, ..turn }, interrupt)?);
            for (name, of_run) in graph.end()? {
                calls.entry(name).or_default().push(of_run);
            }
        }
        let time = |(name, runs): (&str, Vec<Calls>)| {
            let of = |value: fn(&Calls) -> f64| {
                let of_runs: Vec<_> = runs.iter().map(|run| vec![value(run)]).collect();
                Summary::of_runs(&of_runs)
            };
            let time = FunctionTime {
                calls: of(|calls| calls.count as f64)?,
                ms: of(|calls| calls.us / 1e3)?,
            };
            Some((name.to_owned(), time))
        };
        Ok(Self {
            trace: turn.player.trace.clone(),
            planner: turn.subject.planner.clone(),
            total_ms: session.row(&turn, host, &runs)?.total_ms,
            functions: calls.into_iter().filter_map(time).collect(),
        })
    }
}
