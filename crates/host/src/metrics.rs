//! What the daemon counts, in Prometheus' text format.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// How a request found its microVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(non_camel_case_types, reason = "labels are written as their variants are named")]
pub(crate) enum StartKind {
    /// Booted for it.
    cold,
    /// Thawed for it.
    thawed,
    /// It was there.
    warm,
}

impl StartKind {
    /// Whether a microVM was started for the request.
    pub(crate) fn is_new(self) -> bool {
        self != Self::warm
    }

    /// As it is written.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::cold => "cold",
            Self::thawed => "thawed",
            Self::warm => "warm",
        }
    }
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "labels are written as their variants are named")]
pub(crate) enum Ending {
    answered,
    function_error,
    throttled,
    failed,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Invoked {
    function: String,
    ending: Ending,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Started {
    start: StartKind,
}

/// The counters.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    invocations: Family<Invoked, Counter>,
    starts: Family<Started, Counter>,
    durations: Family<Started, Histogram>,
    pub(crate) start_failures: Counter,
    pub(crate) monitors: Gauge,
    pub(crate) standby: Gauge,
    pub(crate) queued: Gauge,
    pub(crate) private_bytes: Gauge<u64, AtomicU64>,
    pub(crate) shared_bytes: Gauge<u64, AtomicU64>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("firn");
        let metrics = Self {
            invocations: Family::default(),
            starts: Family::default(),
            // 1 ms to 65 s.
            durations: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(0.001, 2.0, 17))
            }),
            start_failures: Counter::default(),
            monitors: Gauge::default(),
            standby: Gauge::default(),
            queued: Gauge::default(),
            private_bytes: Gauge::default(),
            shared_bytes: Gauge::default(),
            registry: Registry::default(),
        };
        registry.register("invocations", "Requests to functions", metrics.invocations.clone());
        registry.register("starts", "Requests by how they found a microVM", metrics.starts.clone());
        registry.register_with_unit(
            "invocation_duration",
            "Request in to answer out",
            Unit::Seconds,
            metrics.durations.clone(),
        );
        registry.register(
            "start_failures",
            "MicroVMs that did not start",
            metrics.start_failures.clone(),
        );
        registry.register("monitors", "MicroVMs that run", metrics.monitors.clone());
        registry.register("standby", "Monitors that stand by", metrics.standby.clone());
        registry.register("queued", "Requests that wait for a microVM", metrics.queued.clone());
        registry.register_with_unit(
            "private_memory",
            "What microVMs are booked for that is each one's own",
            Unit::Bytes,
            metrics.private_bytes.clone(),
        );
        registry.register_with_unit(
            "shared_memory",
            "What microVMs are booked for that they share",
            Unit::Bytes,
            metrics.shared_bytes.clone(),
        );
        Self { registry, ..metrics }
    }
}

impl Metrics {
    /// Counts a request that got a microVM.
    pub(crate) fn started(&self, start: StartKind, seconds: f64) {
        let labels = Started { start };
        self.starts.get_or_create(&labels).inc();
        self.durations.get_or_create(&labels).observe(seconds);
    }

    /// Counts a request that has ended.
    pub(crate) fn ended(&self, function: &str, ending: Ending) {
        let labels = Invoked { function: function.to_owned(), ending };
        self.invocations.get_or_create(&labels).inc();
    }

    /// All of it.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
