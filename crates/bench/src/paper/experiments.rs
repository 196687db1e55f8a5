//! The rows of the table of experiments, in the order of the papers and their figures.

use super::replays::{Medium, Quantity, Replays, Shape, Storage};
use super::systor::{self, SystorExperiment};
use super::table::{Experiment, Verdict, Way};
use crate::tier::Throttle;

const MIB: u64 = 1 << 20;
/// The systems that PASS compares, and `firn`.
const OF_PASS: &[&str] =
    &["firecracker", "vanilla_dax", "faasnap", "dram_cached", "pass", "pass_shared", "firn"];
/// Those of its experiments with many microVMs.
const OF_MANY: &[&str] = &["vanilla_dax", "faasnap", "pass", "pass_shared", "firn"];
const OF_FAASNAP: &[&str] = &["firecracker", "reap", "faasnap", "dram_cached"];
const OF_SNAPBPF: &[&str] = &[
    "firecracker:readahead=off",
    "firecracker:readahead=on",
    "reap",
    "faast",
    "faasnap",
    "snapbpf",
];
/// The functions of PASS table 4, with input A of FaaSnap table 2.
const NINE: &[&str] = &[
    "compression-a",
    "json-a",
    "image-a",
    "pyaes-a",
    "chameleon-a",
    "recognition-a",
    "pagerank-a",
    "matmul-a",
    "ffmpeg-a",
];
/// The same with both inputs: FaaSnap figure 6.
const NINE_TWICE: &[&str] = &[
    "chameleon-a",
    "chameleon-b",
    "compression-a",
    "compression-b",
    "ffmpeg-a",
    "ffmpeg-b",
    "image-a",
    "image-b",
    "json-a",
    "json-b",
    "matmul-a",
    "matmul-b",
    "pagerank-a",
    "pagerank-b",
    "pyaes-a",
    "pyaes-b",
    "recognition-a",
    "recognition-b",
];
/// FaaSnap's synthetic functions, which have one input.
const SYNTHETIC: &[&str] = &["hello-a", "read-list-a", "mmap-a"];
/// All functions of FaaSnap table 2 with input A.
const OF_TABLE_2: &[&str] = &[
    "hello-a",
    "read-list-a",
    "mmap-a",
    "chameleon-a",
    "compression-a",
    "ffmpeg-a",
    "image-a",
    "json-a",
    "matmul-a",
    "pagerank-a",
    "pyaes-a",
    "recognition-a",
];
/// The functions of SnapBPF's figures for which there are traces.
const OF_FIGURE_3: &[&str] = &[
    "bert-a",
    "chameleon-a",
    "graph_bfs-a",
    "html_serving-a",
    "image-a",
    "json-a",
    "pyaes-a",
    "rnn-a",
];
const NOT_OF_PAPER: &str = "Not all of `snapbpf` is the paper's: a thread issues the prefetch in place of a BPF program, and pages \
                          reported free at the freeze are anonymous in place of pages marked at their allocation.";
/// Budgets for microVMs: the paper has one, 128 GB.
const BUDGETS: &[u64] = &[64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB, 1024 * MIB, 2048 * MIB];
/// The paper's disks: the local NVMe SSD (3.1) and the EBS volume (6.7). Writes have no limit.
const DISKS: &[Storage] = &[
    Storage { name: "local NVMe", limits: limits(285_000, 1_589_000_000) },
    Storage { name: "remote EBS", limits: limits(64_000, 1_000_000_000) },
];

/// PASS figure 4. The paper has FaaSnap alone.
const FAASNAP_BY_MEDIUM: Replays = Replays {
    planners: &["faasnap"],
    traces: NINE,
    quantity: Quantity::FetchCounts,
    ..Replays::ONE
};
/// PASS figure 14 and its costs: budgets that microVMs fill.
const FILLED: Replays = Replays {
    planners: OF_PASS,
    traces: &["recognition-a", "ffmpeg-a", "json-a"],
    work: false,
    shape: Shape::Capacity(BUDGETS),
    ..Replays::ONE
};
/// FaaSnap figure 10.
const BURSTS: Replays = Replays {
    planners: OF_FAASNAP,
    traces: &["hello-a", "json-a"],
    unsanitised: true,
    shape: Shape::Concurrency(&[1, 4, 16, 64]),
    ..Replays::ONE
};
/// SnapBPF figure 3b, of which 3a and 3c differ a little.
const TEN_OF_SNAPBPF: Replays = Replays {
    planners: OF_SNAPBPF,
    traces: OF_FIGURE_3,
    unsanitised: true,
    same_input: OF_FIGURE_3,
    shape: Shape::Concurrency(&[10]),
    remarks: &[NOT_OF_PAPER],
    ..Replays::ONE
};

const fn limits(read_iops: u64, read_bps: u64) -> Throttle {
    Throttle { read_iops, read_bps }
}

/// A row of SYSTOR '22.
const fn tiers(of: SystorExperiment, verdict: Verdict, measured: &'static str) -> Experiment {
    let SystorExperiment { name, source, title, .. } = of;
    Experiment { name, source, title, way: Way::Tiers(of), verdict, measured }
}

/// Every experiment.
pub static EXPERIMENTS: [Experiment; 36] = [
    Experiment {
        name: "pass-figure-2",
        source: "PASS 2.1, figure 2",
        title: "Page faults in a start",
        way: Way::Replays(&[Replays {
            planners: &["vanilla_dax", "firecracker", "dram_cached"],
            traces: NINE,
            warm: true,
            quantity: Quantity::Faults,
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("on two of nine functions; on the others page faults take more"),
        measured: "[nine functions](pass.md#figure-2-page-faults-in-a-start)",
    },
    Experiment {
        name: "pass-figure-3",
        source: "PASS 2.3, figure 3",
        title: "Many starts at once of FaaSnap and of cached snapshots",
        way: Way::Replays(&[Replays {
            planners: &["faasnap", "dram_cached"],
            traces: &["recognition-a"],
            shape: Shape::Concurrency(&[1, 2, 4, 8, 16, 32]),
            ..Replays::ONE
        }]),
        verdict: Verdict::Differs("FaaSnap catches up with the cached snapshots"),
        measured: "[recognition](pass.md#figure-3-many-starts-at-once)",
    },
    Experiment {
        name: "pass-figure-4",
        source: "PASS 2.4, figure 4",
        title: "FaaSnap on a DAX file system",
        way: Way::Replays(&[
            Replays {
                medium: Medium::Dax,
                remarks: &["The snapshots are on a DAX file system."],
                ..FAASNAP_BY_MEDIUM
            },
            Replays {
                part: "page-cache",
                medium: Medium::PageCache,
                remarks: &["The snapshots are on a file system with a page cache."],
                ..FAASNAP_BY_MEDIUM
            },
        ]),
        verdict: Verdict::CannotShow(
            "times without persistent memory; the cause agrees, in counts",
        ),
        measured: "[nine functions](pass.md#figure-4-faasnap-on-a-dax-file-system)",
    },
    Experiment {
        name: "pass-figure-9",
        source: "PASS 5.2, figure 9",
        title: "Execution time by function",
        way: Way::Replays(&[Replays { planners: OF_PASS, traces: NINE, ..Replays::ONE }]),
        verdict: Verdict::Agrees("in the order, with larger gains on seven of nine functions"),
        measured: "[nine functions](pass.md#figure-9-execution-time-by-function)",
    },
    Experiment {
        name: "pass-figure-10",
        source: "PASS 5.2, figure 10",
        title: "Ephemeral workloads",
        way: Way::Replays(&[Replays {
            planners: OF_PASS,
            traces: &["json-a", "recognition-a", "ffmpeg-a", "read-list-a"],
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly(
            "on json, recognition and ffmpeg; on read-list FaaSnap gains nothing",
        ),
        measured: "[four functions](pass.md#figure-10-ephemeral-workloads)",
    },
    Experiment {
        name: "pass-figure-11",
        source: "PASS 5.3, figure 11",
        title: "Execution time at a concurrency of 32",
        way: Way::Replays(&[Replays {
            planners: OF_MANY,
            traces: NINE,
            shape: Shape::Concurrency(&[32]),
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("in the order, where all 32 have a replica"),
        measured: "[nine functions](pass.md#figure-11-32-at-once)",
    },
    Experiment {
        name: "pass-figure-12",
        source: "PASS 5.3, figure 12",
        title: "Execution time by concurrency",
        way: Way::Replays(&[Replays {
            planners: OF_MANY,
            traces: &["recognition-a", "ffmpeg-a", "json-a"],
            shape: Shape::Concurrency(&[2, 4, 8, 16, 32, 64]),
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("where every microVM has a replica; FaaSnap's time grows earlier"),
        measured: "[recognition, ffmpeg and json](pass.md#figure-12-many-at-once)",
    },
    Experiment {
        name: "pass-figure-13",
        source: "PASS 5.3, figure 13",
        title: "Execution time of 32 requests by memory",
        way: Way::Replays(&[Replays {
            planners: &["vanilla_dax", "firecracker", "faasnap", "pass", "pass_shared", "firn"],
            traces: &["recognition-a", "ffmpeg-a", "json-a"],
            shape: Shape::Memory(
                32,
                &[4096 * MIB, 2048 * MIB, 1024 * MIB, 512 * MIB, 256 * MIB, 128 * MIB],
            ),
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly(
            "on recognition, and on json at the smallest budget; the pool is left out",
        ),
        measured: "[json and recognition](pass.md#figure-13-memory-pressure)",
    },
    Experiment {
        name: "pass-figure-14",
        source: "PASS 5.3, figure 14",
        title: "Maximum concurrency by the budget",
        way: Way::Replays(&[Replays { quantity: Quantity::Carried, ..FILLED }]),
        verdict: Verdict::Partly("with small budgets; the order turns where the pool is full"),
        measured: "[three functions, six budgets, three pools](pass.md#figure-14-how-many-fit)",
    },
    Experiment {
        name: "pass-table-1",
        source: "PASS 2.2, table 1",
        title: "An ephemeral workload: time and memory",
        way: Way::Replays(&[Replays {
            planners: &["firecracker", "faasnap", "dram_cached", "pass", "pass_shared", "firn"],
            traces: &["json-a"],
            quantity: Quantity::Dram,
            ..Replays::ONE
        }]),
        verdict: Verdict::Differs("SnapStart and FaaSnap are reversed in memory"),
        measured: "[json](pass.md#table-1-an-ephemeral-workload)",
    },
    Experiment {
        name: "pass-table-2",
        source: "PASS 2.5, table 2",
        title: "DAX faults of a start",
        way: Way::Replays(&[Replays {
            planners: &["vanilla_dax"],
            traces: NINE,
            medium: Medium::Dax,
            quantity: Quantity::KernelFaults,
            remarks: &[
                "The kernel times its own functions, which takes time that is part of the total and of the outer function.",
            ],
            ..Replays::ONE
        }]),
        verdict: Verdict::CannotShow(
            "times without persistent memory; the order agrees, in counts",
        ),
        measured: "[recognition](pass.md#table-2-dax-faults-of-a-start)",
    },
    Experiment {
        name: "pass-table-5",
        source: "PASS 5.2, table 5",
        title: "Time in page faults",
        way: Way::Replays(&[Replays {
            planners: OF_PASS,
            traces: &["recognition-a", "json-a", "pyaes-a", "read-list-a"],
            quantity: Quantity::Faults,
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("as to DRAM-Cached and PASS, not as to FaaSnap"),
        measured: "[four functions](pass.md#table-5-where-the-time-goes)",
    },
    Experiment {
        name: "pass-cost",
        source: "PASS 5.3, cost-effectiveness",
        title: "Price of a microVM's memory by the budget",
        way: Way::Replays(&[Replays { quantity: Quantity::Price, ..FILLED }]),
        verdict: Verdict::Differs("reversed"),
        measured: "[three functions, six budgets](pass.md#the-cost-model)",
    },
    Experiment {
        name: "faasnap-figure-1",
        source: "FaaSnap 3.2, figure 1",
        title: "Parts of an invocation",
        way: Way::Replays(&[Replays {
            planners: &["firecracker", "dram_cached", "reap"],
            traces: &["hello-a", "read-list-a", "mmap-a", "image-a", "image-diff-a"],
            unsanitised: true,
            same_input: &["hello-a", "read-list-a", "mmap-a", "image-a"],
            warm: true,
            quantity: Quantity::Parts,
            remarks: &["A warm invocation repeats the trace in the same microVM."],
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("as to Firecracker and Cached, not as to REAP"),
        measured: "[five functions](faasnap.md#figure-1-parts-of-an-invocation)",
    },
    Experiment {
        name: "faasnap-figure-2",
        source: "FaaSnap 3.3, figure 2",
        title: "Histogram of fault times",
        way: Way::Replays(&[Replays {
            planners: &["firecracker", "dram_cached", "reap"],
            traces: &["image-diff-a"],
            unsanitised: true,
            quantity: Quantity::FaultTimes,
            remarks: &[
                "The paper times KVM's handler of a fault; here the guest times each first touch of a page, with or without a \
                 fault, exit and entry included.",
                "The paper's Warm is missing: a second invocation of the trace touches no page that the first has not.",
            ],
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("as to Firecracker and Cached, not as to REAP"),
        measured: "[image-diff](faasnap.md#figure-2-histogram-of-fault-times)",
    },
    Experiment {
        name: "faasnap-figure-6",
        source: "FaaSnap 6.2, figure 6",
        title: "Execution time, recorded on the other input",
        way: Way::Replays(&[Replays {
            planners: OF_FAASNAP,
            traces: NINE_TWICE,
            unsanitised: true,
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("as to Firecracker, not as to REAP"),
        measured: "[18 traces](faasnap.md#figure-6-recorded-on-the-other-input)",
    },
    Experiment {
        name: "faasnap-figure-7",
        source: "FaaSnap 6.2, figure 7",
        title: "Synthetic functions",
        way: Way::Replays(&[Replays {
            planners: OF_FAASNAP,
            traces: SYNTHETIC,
            unsanitised: true,
            same_input: SYNTHETIC,
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("on mmap, not on hello and read-list"),
        measured: "[three functions](faasnap.md#figure-7-synthetic-functions)",
    },
    Experiment {
        name: "faasnap-figure-8",
        source: "FaaSnap 6.3, figure 8",
        title: "Execution time by the size of the input",
        way: Way::Replays(&[Replays {
            planners: OF_FAASNAP,
            traces: &[
                "chameleon",
                "compression",
                "ffmpeg",
                "image",
                "json",
                "matmul",
                "pagerank",
                "pyaes",
                "recognition",
            ],
            unsanitised: true,
            shape: Shape::Sizes,
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("as to Firecracker, and as to REAP with larger inputs"),
        measured: "[nine functions, five sizes](faasnap.md#figure-8-the-size-of-the-input)",
    },
    Experiment {
        name: "faasnap-figure-9",
        source: "FaaSnap 6.5, figure 9",
        title: "Steps of the optimisation",
        way: Way::Replays(&[Replays {
            planners: &[
                "firecracker",
                "faasnap:loading_set=off,regions=off",
                "faasnap:loading_set=off",
                "faasnap",
                "faasnap:loading_set=off,paging=off",
                "faasnap:paging=off",
            ],
            traces: &["image-a"],
            quantity: Quantity::Fetch,
            remarks: &[
                "In the order of the paper: Firecracker, concurrent paging, per-region mapping, FaaSnap. Below them per-region \
                 mapping and the loading-set file without a loader.",
                "All guests are sanitised, because the steps share one snapshot.",
            ],
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("in the last step alone"),
        measured: "[image](faasnap.md#figure-9-steps-of-the-optimisation)",
    },
    Experiment {
        name: "faasnap-figure-10",
        source: "FaaSnap 6.6, figure 10",
        title: "Bursts",
        way: Way::Replays(&[
            Replays { remarks: &["All microVMs are of the same snapshot."], ..BURSTS },
            Replays {
                part: "different",
                different: true,
                remarks: &["Each microVM is of a snapshot of its own."],
                ..BURSTS
            },
        ]),
        verdict: Verdict::Partly("as to Firecracker up to 16, as to REAP from 16 on"),
        measured: "[1 to 64 of one snapshot](faasnap.md#figure-10-bursts)",
    },
    Experiment {
        name: "faasnap-figure-11",
        source: "FaaSnap 6.7, figure 11",
        title: "Remote storage",
        way: Way::Replays(&[Replays {
            planners: &["firecracker", "reap", "faasnap"],
            traces: OF_TABLE_2,
            unsanitised: true,
            same_input: SYNTHETIC,
            shape: Shape::Storage(DISKS),
            remarks: &[
                "The disks are emulated: a compressed disk in memory (zram) with the paper's limits of reads and bytes. The \
                 latency of the EBS volume is not in the paper, and not emulated.",
            ],
            ..Replays::ONE
        }]),
        verdict: Verdict::Differs(
            "the disk's limits cost little; FaaSnap gains on Firecracker, not on REAP",
        ),
        measured: "[12 functions](faasnap.md#figure-11-remote-storage)",
    },
    Experiment {
        name: "faasnap-table-3",
        source: "FaaSnap 6.4, table 3",
        title: "What a start reads and waits for",
        way: Way::Replays(&[Replays {
            planners: &["reap", "faasnap"],
            traces: &["ffmpeg-a", "image-a"],
            unsanitised: true,
            quantity: Quantity::Fetch,
            ..Replays::ONE
        }]),
        verdict: Verdict::Differs("REAP is the faster one on image, and level on ffmpeg"),
        measured: "[ffmpeg and image](faasnap.md#table-3-what-a-start-reads-and-waits-for)",
    },
    Experiment {
        name: "snapbpf-figure-3a",
        source: "SnapBPF 4, figure 3a",
        title: "Latency of one instance",
        way: Way::Replays(&[Replays {
            planners: &["reap", "faasnap", "snapbpf"],
            shape: Shape::Concurrency(&[1]),
            ..TEN_OF_SNAPBPF
        }]),
        verdict: Verdict::Partly("as to FaaSnap, not as to REAP"),
        measured: "[eight functions](snapbpf.md#figure-3a-latency-of-one-instance)",
    },
    Experiment {
        name: "snapbpf-figure-3b",
        source: "SnapBPF 4, figure 3b",
        title: "Latency of 10 instances",
        way: Way::Replays(&[TEN_OF_SNAPBPF]),
        verdict: Verdict::Partly("in the order on six of eight, not in size"),
        measured: "[eight functions](snapbpf.md#figure-3b-latency-of-10-instances)",
    },
    Experiment {
        name: "snapbpf-figure-3c",
        source: "SnapBPF 4, figure 3c",
        title: "Memory of 10 instances",
        way: Way::Replays(&[Replays { quantity: Quantity::Dram, ..TEN_OF_SNAPBPF }]),
        verdict: Verdict::Agrees("but for graph_bfs"),
        measured: "[eight functions](snapbpf.md#figure-3c-memory-of-10-instances)",
    },
    Experiment {
        name: "snapbpf-figure-4",
        source: "SnapBPF 4, figure 4",
        title: "Marking and prefetch alone",
        way: Way::Replays(&[Replays {
            planners: &[
                "firecracker:readahead=on",
                "snapbpf:prefetch=off",
                "snapbpf:marking=off",
                "snapbpf",
            ],
            traces: OF_FIGURE_3,
            same_input: OF_FIGURE_3,
            quantity: Quantity::SpeedUp,
            remarks: &[
                NOT_OF_PAPER,
                "The guests had reported their free pages before the freeze. With `prefetch=off` read-ahead is on, as in the \
                 baseline.",
            ],
            ..Replays::ONE
        }]),
        verdict: Verdict::Partly("as to the prefetch, not as to marking alone"),
        measured: "[eight functions](snapbpf.md#figure-4-marking-and-prefetch-alone)",
    },
    Experiment {
        name: "snapbpf-overhead",
        source: "SnapBPF 4, overheads",
        title: "Cost of the BPF programs",
        way: Way::Replays(&[Replays {
            planners: &["snapbpf"],
            traces: OF_FIGURE_3,
            same_input: OF_FIGURE_3,
            quantity: Quantity::Programs,
            remarks: &[
                "The offsets of each profile are loaded into a BPF map, and the program that captures offsets is loaded and \
                 attached. The prefetch here needs neither, so its times do not contain them.",
            ],
            ..Replays::ONE
        }]),
        verdict: Verdict::Agrees(""),
        measured: "[eight functions](snapbpf.md#overheads-the-cost-of-the-bpf-programs)",
    },
    tiers(
        systor::FIGURE_2,
        Verdict::Partly("in the order, not in size by class"),
        "[ten functions](systor.md#figure-2-cold-and-warm-by-tier)",
    ),
    tiers(
        systor::FIGURE_3,
        Verdict::Partly("in the order, and in connecting nearly in size but for `ssd`"),
        "[ten functions](systor.md#figure-3-parts-of-a-cold-invocation)",
    ),
    tiers(
        systor::FIGURE_4,
        Verdict::Partly(
            "as to `dcpm` and `nvme` on Mid and Heavy; that `ssd` stops at four is a parameter",
        ),
        "[ten functions](systor.md#figures-4-to-6-several-microvms-at-once)",
    ),
    tiers(
        systor::FIGURE_5,
        Verdict::Partly("as to `dcpm` and `nvme` on Mid and Heavy functions"),
        "[three functions](systor.md#figures-4-to-6-several-microvms-at-once)",
    ),
    tiers(
        systor::FIGURE_6,
        Verdict::Partly("as to `ssd` on hello; `dcpm` and `nvme` differ within the noise"),
        "[three functions](systor.md#figures-4-to-6-several-microvms-at-once)",
    ),
    tiers(
        systor::FIGURE_7,
        Verdict::Partly("it scales worse, but harms on `nvme` alone"),
        "[three functions](systor.md#figure-7-read-ahead)",
    ),
    tiers(
        systor::TABLE_3,
        Verdict::Differs("five of ten"),
        "[ten functions](systor.md#table-3-classes)",
    ),
    tiers(
        systor::TABLE_4,
        Verdict::Partly("on Light functions"),
        "[ten functions](systor.md#table-4-working-sets)",
    ),
    tiers(
        systor::TABLE_5,
        Verdict::Partly("in the order, and in size on Mid functions"),
        "[ten functions](systor.md#table-5-cold-divided-by-warm)",
    ),
];
