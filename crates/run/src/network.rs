//! The host's side of a guest's network.

use std::io;

use firn_agent::protocol::NetworkAddresses;
use firn_base::ErrorChain;
use firn_vmm::{Network, RateLimit, RateLimiter, Tap};
use serde::{Deserialize, Serialize};

use crate::descriptors::{Descriptors, Slot};
use crate::error::StartError;

/// Where a guest's frames go.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NetworkSpec {
    /// A tap device, open.
    pub tap: Slot,
    /// Limits frames to the guest.
    pub to_guest: RateLimit,
    /// Limits frames from the guest.
    pub from_guest: RateLimit,
    /// What the guest's interface gets; `None` to leave that to the guest.
    pub addresses: Option<NetworkAddresses>,
}

impl NetworkSpec {
    /// Opens an existing tap device, without limits and addresses.
    ///
    /// # Errors
    /// [`StartError::Host`]: the device cannot be used.
    pub fn tap(name: &str, descriptors: &mut Descriptors) -> Result<Self, StartError> {
        let tap = Tap::open(name).map_err(|error| StartError::Host(ErrorChain::of(&error)))?;
        let (to_guest, from_guest) = Default::default();
        Ok(Self { tap: descriptors.add(tap), to_guest, from_guest, addresses: None })
    }

    /// Takes the descriptors.
    pub(crate) fn take(&self, descriptors: &mut Descriptors) -> Result<Network, StartError> {
        let limiter = |limit: RateLimit| -> io::Result<Option<RateLimiter>> {
            (limit != RateLimit::default()).then(|| RateLimiter::new(limit)).transpose()
        };
        let failed = |error| StartError::session("make a timer", error);
        Ok(Network {
            backend: Some(Box::new(Tap::new(descriptors.take(self.tap)?))),
            to_guest: limiter(self.to_guest).map_err(failed)?,
            from_guest: limiter(self.from_guest).map_err(failed)?,
        })
    }
}
