//! Copy-on-write over sealed guest memory, which the host maps read-only.
//!
//! A sealed chunk of 2 MiB is copied before its first write: [`copy_ahead`] copies what is
//! certainly written before the guest starts, [`CowMemory`] copies the rest when the guest writes
//! to it.

pub(crate) mod copy_ahead;
mod write_faults;

#[cfg(test)]
pub(crate) mod testing;

pub(crate) use write_faults::{CowMemory, WriteFaultError};

use firn_memory::GuestView;
use vm_memory::{Bytes, GuestAddress};

use crate::access::PhysicalMemory;

impl PhysicalMemory for GuestView {
    fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read_slice(&mut bytes, GuestAddress(address)).ok()?;
        Some(bytes)
    }
}
