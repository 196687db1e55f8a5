//! Tokens of a metadata service. They are not stored: each has its own end, and a code of it by a
//! key that the service has made.

use std::io;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit, Mac};
use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

/// The times to live that a guest may ask for, seconds: up to 6 hours.
pub(super) const TTL_SECONDS: std::ops::RangeInclusive<u32> = 1..=21_600;

/// Bytes of a token's end, ms after the service started.
const END: usize = 8;

/// Makes tokens and checks them.
#[derive(Debug)]
pub(super) struct Tokens {
    key: Hmac<Sha256>,
    started: Instant,
}

impl Tokens {
    /// Tokens by a new random key.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub(super) fn new() -> io::Result<Self> {
        let mut key = [0; 32];
        // At most 256 bytes come at once, or an error.
        retry_on_intr(|| getrandom(&mut key, GetRandomFlags::empty()))?;
        let key = Hmac::new_from_slice(&key).map_err(io::Error::other)?;
        Ok(Self { key, started: Instant::now() })
    }

    /// A token that is valid for so many seconds from `now` on.
    pub(super) fn issue(&self, ttl_seconds: u32, now: Instant) -> String {
        let end = self.elapsed(now).saturating_add(u64::from(ttl_seconds) * 1000).to_be_bytes();
        let mut token = end.to_vec();
        token.extend_from_slice(&self.key.clone().chain_update(end).finalize().into_bytes());
        URL_SAFE_NO_PAD.encode(token)
    }

    /// Whether this service has issued the token, and it has not ended.
    pub(super) fn is_valid(&self, token: &[u8], now: Instant) -> bool {
        let Ok(token) = URL_SAFE_NO_PAD.decode(token) else { return false };
        let Some((end, code)) = token.split_first_chunk::<END>() else { return false };
        let is_issued = self.key.clone().chain_update(end).verify_slice(code).is_ok();
        is_issued && self.elapsed(now) < u64::from_be_bytes(*end)
    }

    fn elapsed(&self, now: Instant) -> u64 {
        let elapsed: Duration = now.saturating_duration_since(self.started);
        u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
#[path = "token_tests.rs"]
mod tests;
