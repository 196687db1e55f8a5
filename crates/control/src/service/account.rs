//! What a tenant uses of the daemon, and may use.

use std::sync::Arc;

use super::Control;
use super::errors::FindError;
use super::tenants::bytes_of;
use crate::blocking::blocking;
use crate::functions::{LATEST, Version};

/// What a tenant uses, and may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Account {
    /// Its functions.
    pub functions: u64,
    /// Its zip files, each counted once, bytes.
    pub code: u64,
    /// Limit of its zip files, bytes: its quota, or what it uses and the free space.
    pub code_limit: u64,
    /// Limit of its requests at once: that of microVMs.
    pub concurrency: usize,
}

impl Control {
    /// What the functions that a tenant can see use, and may use.
    ///
    /// # Errors
    /// See [`FindError`].
    pub async fn account(self: &Arc<Self>, tenant: Option<String>) -> Result<Account, FindError> {
        let versions = self.functions(tenant.clone(), true).await?;
        let layers = self.layers(tenant.clone()).await?;
        let control = Arc::clone(self);
        blocking(move || {
            let latest = versions.iter().filter(|version| version.version == LATEST);
            let functions = u64::try_from(latest.count()).unwrap_or(u64::MAX);
            let layers = layers.into_iter().flat_map(|(_, versions)| versions);
            let codes = versions.iter().flat_map(Version::codes).cloned();
            let code = bytes_of(codes.chain(layers.map(|layer| layer.code)));
            let quota = control.tenants.code_quota(tenant.as_deref());
            let code_limit = quota.unwrap_or_else(|| code.saturating_add(control.code.free()));
            Ok(Account { functions, code, code_limit, concurrency: control.monitors })
        })
        .await
    }
}
