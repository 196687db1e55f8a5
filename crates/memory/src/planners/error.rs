//! Why a planner returns no plan.

use thiserror::Error;

use crate::plan::Leaf;

/// Why a planner returns no plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlannerError {
    /// The host has too little memory.
    #[error(
        "{planner} keeps the whole image in DRAM: {needed} bytes, but this host has {total}; \
         use a planner that pages on demand"
    )]
    TooLittleMemory {
        /// The planner, with its options.
        planner: String,
        /// Bytes of the image.
        needed: u64,
        /// Bytes of DRAM.
        total: u64,
    },
    /// It pages from an image file, but the snapshot is in a pool.
    #[error(
        "{planner} pages from an image file, but this snapshot is in a pool; \
         use pass or pass_shared, or freeze into a directory"
    )]
    NoFile {
        /// The planner, with its options.
        planner: String,
    },
    /// This process may not use userfaultfd.
    #[error(
        "{planner} serves page faults with userfaultfd, which this process may not use; run as root, or set the sysctl \
         vm.unprivileged_userfaultfd to 1"
    )]
    NoUserfaultfd {
        /// The planner, with its options.
        planner: String,
    },
    /// It maps the medium itself, but the file system uses the page cache.
    #[error(
        "{planner} maps an image on a DAX file system, but this image is on another; put it on an ext4 or xfs that is mounted \
         with -o dax (statx(2) shows STATX_ATTR_DAX)"
    )]
    NoDax {
        /// The planner, with its options.
        planner: String,
    },
    /// It maps an extent, but the snapshot is in a directory.
    #[error(
        "{planner} maps the extent of a pool, but this snapshot is a directory; freeze it into a pool"
    )]
    NoExtent {
        /// The planner, with its options.
        planner: String,
    },
    /// It writes to the extent, which is not a replica.
    #[error(
        "{planner} requires a replica, but the pool granted the sealed extent; request a replica from the pool"
    )]
    NoReplica {
        /// The planner, with its options.
        planner: String,
    },
    /// A part of the profile is missing.
    #[error(
        "{planner} needs {part} in the snapshot's profile; record it with `firn profile record --part {option}`"
    )]
    NoProfile {
        /// The planner, with its options.
        planner: String,
        /// The part, as text.
        part: &'static str,
        /// The part, as an option of the command.
        option: &'static str,
    },
    /// The file that was packed from the image is missing.
    #[error(
        "{planner} needs the snapshot's {file}; make it with `firn profile pack --planner {planner}`"
    )]
    NoPackedFile {
        /// The planner, with its options.
        planner: String,
        /// The file's name.
        file: &'static str,
    },
    /// The packed file is not valid.
    #[error(
        "{planner} cannot use the snapshot's packed file: {reason}; make it anew with `firn profile pack --planner {planner}`"
    )]
    PackedFile {
        /// The planner, with its options.
        planner: String,
        /// The defect.
        reason: String,
    },
    /// The packed file was made from another profile, or with other options.
    #[error(
        "the snapshot's {file} was packed from another profile or with other options than those of {planner}; \
         make it anew with `firn profile pack --planner {planner}`"
    )]
    OtherPackedFile {
        /// The planner, with its options.
        planner: String,
        /// The file's name.
        file: &'static str,
    },
    /// The plan needs more mappings than a process may have.
    #[error(
        "{planner} needs {needed} mappings, but only {limit} are available; raise vm.max_map_count, or use a planner \
         that maps the image whole"
    )]
    TooManyMappings {
        /// The planner, with its options.
        planner: String,
        /// Mappings of the plan, while its layers are applied.
        needed: u64,
        /// Mappings that are available for it.
        limit: u64,
    },
    /// The medium is mapped in whole leaves only, and a region of guest memory is not made of them.
    #[error(
        "{planner} maps this medium in whole leaves of {leaf}, and guest memory ({bytes} bytes) is not made of them: use a guest \
         with a multiple of {leaf} of memory, or a medium with smaller leaves (ndctl: --align=2M)"
    )]
    PartOfLeaf {
        /// The planner, with its options.
        planner: String,
        /// The leaf at which the host maps the medium.
        leaf: Leaf,
        /// Bytes of guest memory.
        bytes: u64,
    },
    /// The medium can neither be mapped privately nor be copied in chunks by the monitor.
    #[error(
        "{planner} copies chunks of 2 MiB of this medium, which is mapped at leaves of {leaf}: guest memory must be \
         whole chunks, and the device's alignment at most 2 MiB (ndctl: --align=2M); or use pass"
    )]
    NoChunks {
        /// The planner, with its options.
        planner: String,
        /// The leaf at which the host maps the snapshot's memory.
        leaf: Leaf,
    },
}
