//! Requests that take effect once: a signed request that is sent again gets the first answer.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Control;
use super::errors::FindError;
use crate::blocking::blocking;

/// Limit of stored answers.
const MAX_ANSWERS: u64 = 4096;

/// How long an answer is kept. A signature is accepted from 15 minutes before its time to 15
/// minutes after it.
const KEPT: Duration = Duration::from_secs(31 * 60);

/// Whether a request may take effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// It is the first with its signature.
    First,
    /// It was answered with this.
    Answered(Vec<u8>),
    /// It was accepted before, but is not answered: it is being served, or the daemon has ended
    /// meanwhile.
    Unanswered,
    /// Too many requests were answered lately.
    Full,
}

impl Control {
    /// Claims the effect of a request with a signature. The claim outlives the daemon.
    ///
    /// # Errors
    /// The database failed.
    pub async fn claim(self: &Arc<Self>, signature: String) -> Result<Claim, FindError> {
        let control = Arc::clone(self);
        let now = seconds(Duration::ZERO);
        blocking(move || Ok(control.store.claim(&signature, now, seconds(KEPT), MAX_ANSWERS)?))
            .await
    }

    /// Stores the answer of a claimed request.
    ///
    /// # Errors
    /// The database failed.
    pub async fn answered(
        self: &Arc<Self>,
        signature: String,
        answer: Vec<u8>,
    ) -> Result<(), FindError> {
        let control = Arc::clone(self);
        blocking(move || Ok(control.store.answer(&signature, &answer)?)).await
    }
}

/// Seconds since 1970, `later` than now.
fn seconds(later: Duration) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now + later).as_secs()
}
