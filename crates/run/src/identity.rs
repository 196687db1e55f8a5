//! What makes one clone differ from every other.

use std::io;
use std::net::Ipv4Addr;

use firn_agent::protocol::{MIN_ENTROPY_BYTES, NetworkAddresses};
use rustix::rand::{GetRandomFlags, getrandom};
use uuid::Uuid;

/// Bytes of entropy that a clone gets: twice the required minimum.
const ENTROPY_BYTES: usize = 2 * MIN_ENTROPY_BYTES;

/// The identity of one clone. The wall clock belongs to it too; it is read when the identity is
/// sent.
#[derive(Clone)]
pub struct Identity {
    /// The VM generation. The monitor has to show the same value by its VM generation id device.
    pub generation: Uuid,
    /// The instance's name, which is also its host name.
    pub instance_id: String,
    /// Random bytes for the guest kernel's generator.
    pub(crate) entropy: [u8; ENTROPY_BYTES],
    /// The addresses of its network interface; `None` to leave them as they are.
    pub addresses: Option<NetworkAddresses>,
    /// The address of its metadata service, if it has one.
    pub metadata: Option<Ipv4Addr>,
}

/// The kernel gave no random bytes.
#[derive(Debug, thiserror::Error)]
#[error("the kernel gives no random bytes for a new identity")]
pub struct IdentityError(#[source] io::Error);

impl Identity {
    /// An identity that no other clone has.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn fresh() -> Result<Self, IdentityError> {
        let mut generation = [0; 16];
        let mut entropy = [0; ENTROPY_BYTES];
        fill(&mut generation)?;
        fill(&mut entropy)?;
        let instance_id = format!("i-{}", Uuid::from_bytes(generation).simple());
        let generation = Uuid::from_bytes(generation);
        Ok(Self { generation, instance_id, entropy, addresses: None, metadata: None })
    }
}

impl std::fmt::Debug for Identity {
    // The entropy is a secret of the clone.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity")
            .field("generation", &self.generation)
            .field("instance_id", &self.instance_id)
            .finish_non_exhaustive()
    }
}

/// Reads of up to 256 bytes are never cut short (getrandom(2)).
fn fill(bytes: &mut [u8]) -> Result<(), IdentityError> {
    getrandom(bytes, GetRandomFlags::empty()).map(|_| ()).map_err(|e| IdentityError(e.into()))
}

#[cfg(test)]
#[path = "identity_tests.rs"]
mod tests;
