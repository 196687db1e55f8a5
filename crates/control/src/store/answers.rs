//! Answers of requests that take effect once, by the requests' signatures.
//!
//! A value is the time until which it is kept, 8 bytes (seconds since 1970), and the answer, which
//! is empty until the request is answered.

use redb::{ReadableTable, ReadableTableMetadata, TableDefinition};

use super::{Store, StoreError, failed};
use crate::service::Claim;

/// The key is the signature.
pub(super) const ANSWERS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("answers");

impl Store {
    /// Claims a signature at the time `now`, until the time `until`. At most `limit` are kept.
    pub(crate) fn claim(
        &self,
        signature: &str,
        now: u64,
        until: u64,
        limit: u64,
    ) -> Result<Claim, StoreError> {
        self.delete(|change| {
            let mut answers = change.transaction.open_table(ANSWERS).map_err(failed)?;
            if let Some(value) = answers.get(signature).map_err(failed)? {
                return Ok(match value.value().get(8..).unwrap_or_default() {
                    [] => Claim::Unanswered,
                    answer => Claim::Answered(answer.to_owned()),
                });
            }
            if answers.len().map_err(failed)? >= limit {
                answers.retain(|_, value| until_of(value) > now).map_err(failed)?;
                if answers.len().map_err(failed)? >= limit {
                    return Ok(Claim::Full);
                }
            }
            answers.insert(signature, until.to_le_bytes().as_slice()).map_err(failed)?;
            Ok(Claim::First)
        })
    }

    /// Stores the answer of a claimed request.
    pub(crate) fn answer(&self, signature: &str, answer: &[u8]) -> Result<(), StoreError> {
        self.delete(|change| {
            let mut answers = change.transaction.open_table(ANSWERS).map_err(failed)?;
            let claimed = answers.get(signature).map_err(failed)?;
            let until = claimed.map_or(0, |value| until_of(value.value()));
            let value = [until.to_le_bytes().as_slice(), answer].concat();
            answers.insert(signature, value.as_slice()).map_err(failed)?;
            Ok(())
        })
    }
}

fn until_of(value: &[u8]) -> u64 {
    value.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
