//! Byte-addressable memory under firn's own management: the pool.
//!
//! The crate is empty. It is to hold what PASS calls the PMEM manager: extents of guest memory on a devdax device, a
//! DAX file system, huge pages or a memfd, and a crash-consistent table from function names to extents. It comes with
//! the planners that restore from a pool; until then images are files, and nothing depends on this crate.
