//! The daemon's counters, in the OpenMetrics text format.
//!
//! The counters of a function go with it, so that their number is limited by the number of
//! functions.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::AtomicU64;

use firn_net::Policy;
use firn_run::ReadyUse;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, EncodeLabelValue, EncodeMetric,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use uuid::Uuid;

/// How a request got its microVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(non_camel_case_types, reason = "the name of a variant is the value of a label")]
pub(crate) enum StartKind {
    /// A microVM was booted for the request.
    cold,
    /// A microVM was thawed for the request.
    thawed,
    /// The microVM was running and idle.
    warm,
}

impl StartKind {
    /// Whether a microVM was started for the request.
    pub(crate) fn is_new(self) -> bool {
        self != Self::warm
    }

    /// The name in labels, reports and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::cold => "cold",
            Self::thawed => "thawed",
            Self::warm => "warm",
        }
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the name of a variant is the value of a label")]
pub(crate) enum Outcome {
    /// The function answered.
    answered,
    /// The function failed.
    function_error,
    /// The daemon refused it for lack of capacity.
    throttled,
    /// The daemon failed.
    failed,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::answered, Self::function_error, Self::throttled, Self::failed];
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Invoked {
    function: String,
    ending: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Started {
    start: StartKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Looked {
    found: ReadyLabel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the name of a variant is the value of a label")]
enum ReadyLabel {
    hit,
    miss,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Decided {
    rule: String,
}

/// The counters of the rules of `--egress`, which the brokers of all guests count up.
#[derive(Debug)]
struct Egress(Policy);

impl Collector for Egress {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        // A rule that is given twice is one here: the second one decides nothing.
        let mut counts = BTreeMap::new();
        for count in self.0.counts() {
            *counts.entry(count.rule).or_default() += count.matched;
        }
        let help = "Connections of guests by the rule of --egress that allowed or denied them";
        let kind = MetricType::Counter;
        let mut metric = encoder.encode_descriptor("egress_connections", help, None, kind)?;
        for (rule, count) in counts {
            let labels = Decided { rule };
            ConstCounter::<u64>::new(count).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// The counters.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    invocations: Family<Invoked, Counter>,
    /// The ids of the functions whose requests are counted, by their names.
    counted: Mutex<HashMap<String, Uuid>>,
    starts: Family<Started, Counter>,
    durations: Family<Started, Histogram>,
    pub(crate) start_failures: Counter,
    pub(crate) monitors: Gauge,
    pub(crate) standby: Gauge,
    ready_starts: Family<Looked, Counter>,
    pub(crate) ready: Gauge,
    pub(crate) ready_bytes: Gauge<u64, AtomicU64>,
    pub(crate) queued: Gauge,
    pub(crate) private_bytes: Gauge<u64, AtomicU64>,
    pub(crate) shared_bytes: Gauge<u64, AtomicU64>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("firn");
        let metrics = Self {
            invocations: Family::default(),
            counted: Mutex::default(),
            starts: Family::default(),
            // 1 ms to 65 s.
            durations: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(0.001, 2.0, 17))
            }),
            start_failures: Counter::default(),
            monitors: Gauge::default(),
            standby: Gauge::default(),
            ready_starts: Family::default(),
            ready: Gauge::default(),
            ready_bytes: Gauge::default(),
            queued: Gauge::default(),
            private_bytes: Gauge::default(),
            shared_bytes: Gauge::default(),
            registry: Registry::default(),
        };
        registry.register("invocations", "Requests to functions", metrics.invocations.clone());
        registry.register("starts", "Requests by how they got a microVM", metrics.starts.clone());
        registry.register_with_unit(
            "invocation_duration",
            "From the request's arrival to the answer",
            Unit::Seconds,
            metrics.durations.clone(),
        );
        registry.register(
            "start_failures",
            "MicroVMs that failed to start",
            metrics.start_failures.clone(),
        );
        registry.register("monitors", "Running microVMs", metrics.monitors.clone());
        registry.register("standby", "Standby monitors", metrics.standby.clone());
        registry.register(
            "ready_starts",
            "Thaws by whether a ready clone was found",
            metrics.ready_starts.clone(),
        );
        registry.register("ready_clones", "Ready clones that wait", metrics.ready.clone());
        registry.register_with_unit(
            "ready_memory",
            "Memory of ready clones that wait",
            Unit::Bytes,
            metrics.ready_bytes.clone(),
        );
        registry.register("queued", "Requests that wait for a microVM", metrics.queued.clone());
        registry.register_with_unit(
            "private_memory",
            "Reserved memory that microVMs do not share",
            Unit::Bytes,
            metrics.private_bytes.clone(),
        );
        registry.register_with_unit(
            "shared_memory",
            "Reserved memory that microVMs share",
            Unit::Bytes,
            metrics.shared_bytes.clone(),
        );
        Self { registry, ..metrics }
    }
}

impl Metrics {
    /// No counts yet, but those of the rules of the guests' networks.
    pub(crate) fn new(network: Option<Policy>) -> Self {
        let mut metrics = Self::default();
        if let Some(policy) = network {
            metrics.registry.register_collector(Box::new(Egress(policy)));
        }
        metrics
    }

    /// Counts a request that got a microVM; `seconds` from its arrival to its answer.
    pub(crate) fn started(&self, start: StartKind, seconds: f64) {
        let labels = Started { start };
        self.starts.get_or_create(&labels).inc();
        self.durations.get_or_create(&labels).observe(seconds);
    }

    /// Counts a thaw by whether it found a ready clone.
    pub(crate) fn looked_for_ready(&self, found: ReadyUse) {
        let found = match found {
            ReadyUse::Hit => ReadyLabel::hit,
            ReadyUse::Miss => ReadyLabel::miss,
        };
        self.ready_starts.get_or_create(&Looked { found }).inc();
    }

    /// Removes the counters of the function `id`, which was deleted.
    pub(crate) fn deleted(&self, function: &str, id: Uuid) {
        let mut counted = self.counted.lock();
        if counted.get(function) == Some(&id) {
            counted.remove(function);
            self.remove(function);
        }
    }

    /// Counts a request to the function `id` that has ended, unless the function was deleted
    /// meanwhile: `exists` tells whether the database has it.
    pub(crate) fn ended(
        &self,
        function: &str,
        id: Uuid,
        ending: Outcome,
        exists: impl FnOnce() -> bool,
    ) {
        // Held until the request is counted: if the function is deleted after `exists` has found
        // it, its counters are removed afterwards.
        let mut counted = self.counted.lock();
        if counted.get(function) != Some(&id) {
            if !exists() {
                return;
            }
            // An earlier function of the name may have some.
            self.remove(function);
            counted.insert(function.to_owned(), id);
        }
        let labels = Invoked { function: function.to_owned(), ending };
        self.invocations.get_or_create(&labels).inc();
    }

    fn remove(&self, function: &str) {
        for ending in Outcome::ALL {
            self.invocations.remove(&Invoked { function: function.to_owned(), ending });
        }
    }

    /// All counters as text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
