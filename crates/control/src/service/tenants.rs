//! Tenants: the owners of functions, and what an owner may use.

use std::collections::{BTreeMap, BTreeSet};

use firn_base::{format_bytes, parse_size};
use firn_memory::planners;

use super::errors::{NotFound, ProvisionedError};
use crate::functions::{
    Code, ConfigurationError, FunctionRecord, SnapshotPlace, Target, Version, VersionState,
};
use crate::instances::guest_mib;
use crate::store::{Change, StoreError};

/// What one tenant may use; `None` does not limit it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Quotas {
    /// The planners that its functions can choose. One without options allows all its options.
    pub planners: Option<Vec<String>>,
    /// Functions.
    pub functions: Option<u64>,
    /// Published versions of all its functions and layers.
    pub versions: Option<u64>,
    /// Zip files of all its functions and layers, each counted once, bytes.
    pub code: Option<u64>,
    /// Snapshots of all its versions, bytes.
    pub snapshots: Option<u64>,
    /// Provisioned microVMs of all its functions.
    pub provisioned: Option<u64>,
}

/// The quotas of all tenants.
#[derive(Debug, Clone, Default)]
pub struct Tenants {
    /// Of functions without an owner, and what the quotas of a tenant leave open.
    pub default: Quotas,
    /// By the tenant's name.
    pub named: BTreeMap<String, Quotas>,
}

/// A tenant would use too much.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// Its functions.
    #[error("there would be {used} functions, and the quota of {} is {quota}: delete functions", of(.tenant))]
    Functions {
        /// The tenant.
        tenant: Option<String>,
        /// What it would use.
        used: u64,
        /// Its limit.
        quota: u64,
    },
    /// Its published versions.
    #[error("{used} versions would be published, and the quota of {} is {quota}: delete versions", of(.tenant))]
    Versions {
        /// The tenant.
        tenant: Option<String>,
        /// What it would use.
        used: u64,
        /// Its limit.
        quota: u64,
    },
    /// Its zip files.
    #[error(
        "the code would take {}, and the quota of {} is {}: delete functions or versions with other code",
        format_bytes(*used), of(.tenant), format_bytes(*quota)
    )]
    Code {
        /// The tenant.
        tenant: Option<String>,
        /// What it would use, bytes.
        used: u64,
        /// Its limit, bytes.
        quota: u64,
    },
    /// Its snapshots.
    #[error(
        "the snapshots would take {}, and the quota of {} is {}: delete versions with SnapStart",
        format_bytes(*used), of(.tenant), format_bytes(*quota)
    )]
    Snapshots {
        /// The tenant.
        tenant: Option<String>,
        /// What it would use, bytes.
        used: u64,
        /// Its limit, bytes.
        quota: u64,
    },
    /// Its provisioned concurrency.
    #[error(
        "{used} microVMs would be provisioned, and the quota of {} is {quota}: lower the provisioned concurrency of \
         other versions",
        of(.tenant)
    )]
    Provisioned {
        /// The tenant.
        tenant: Option<String>,
        /// What it would use.
        used: u64,
        /// Its limit.
        quota: u64,
    },
}

fn of(tenant: &Option<String>) -> String {
    tenant.as_ref().map_or_else(|| "this daemon".to_owned(), |name| format!("the tenant {name}"))
}

/// What the functions of one tenant use.
#[derive(Debug, Default)]
struct Usage {
    versions: u64,
    code: u64,
    snapshots: u64,
}

impl Quotas {
    /// Sets the quota of a name: `planners`, separated by commas or spaces, `functions`,
    /// `versions`, `code`, `snapshots` or `provisioned`.
    ///
    /// # Errors
    /// What is wrong.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let size = || parse_size(value).map(Some).map_err(|error| error.to_string());
        let number = || value.parse().map(Some).map_err(|_| format!("{value:?} is not a number"));
        match name {
            "planners" => {
                let names = value.split([',', ' ']).filter(|name| !name.is_empty());
                let names: Vec<String> = names.map(ToOwned::to_owned).collect();
                for name in &names {
                    planners::parse(name).map_err(|error| error.to_string())?;
                }
                self.planners = Some(names);
            }
            "functions" => self.functions = number()?,
            "versions" => self.versions = number()?,
            "code" => self.code = size()?,
            "snapshots" => self.snapshots = size()?,
            "provisioned" => self.provisioned = number()?,
            _ => {
                let names = "planners, functions, versions, code, snapshots and provisioned";
                return Err(format!("the quotas are {names}"));
            }
        }
        Ok(())
    }

    /// The same, completed by `default`.
    fn or(self, default: &Self) -> Self {
        Self {
            planners: self.planners.or_else(|| default.planners.clone()),
            functions: self.functions.or(default.functions),
            versions: self.versions.or(default.versions),
            code: self.code.or(default.code),
            snapshots: self.snapshots.or(default.snapshots),
            provisioned: self.provisioned.or(default.provisioned),
        }
    }
}

impl Tenants {
    fn of(&self, tenant: Option<&str>) -> Quotas {
        let named = tenant.and_then(|name| self.named.get(name)).cloned();
        named.unwrap_or_default().or(&self.default)
    }

    /// Limit of a tenant's zip files, bytes.
    pub(super) fn code_quota(&self, tenant: Option<&str>) -> Option<u64> {
        self.of(tenant).code
    }

    /// Refuses a planner that a version names and its owner may not choose.
    pub(super) fn check_planner(
        &self,
        tenant: Option<&str>,
        version: &Version,
    ) -> Result<(), ConfigurationError> {
        let Some(planner) = version.named_planner() else { return Ok(()) };
        let Some(allowed) = self.of(tenant).planners else { return Ok(()) };
        let name = planner.split(':').next().unwrap_or_default();
        if allowed.iter().any(|allowed| allowed == planner || allowed == name) {
            return Ok(());
        }
        let (planner, allowed) = (planner.to_owned(), allowed.join(", "));
        Err(ConfigurationError::PlannerRefused { planner, allowed })
    }

    /// Checks the number of an owner's functions, in the transaction that creates one.
    pub(super) fn check_functions<E: From<StoreError> + From<QuotaError>>(
        &self,
        change: &Change,
        tenant: Option<&str>,
    ) -> Result<(), E> {
        let Some(quota) = self.of(tenant).functions else { return Ok(()) };
        let functions = change.functions()?;
        let own = functions.iter().filter(|function| function.owner.as_deref() == tenant);
        let used = u64::try_from(own.count()).unwrap_or(u64::MAX);
        if used <= quota {
            return Ok(());
        }
        Err(QuotaError::Functions { tenant: tenant.map(ToOwned::to_owned), used, quota }.into())
    }

    /// Checks the code of a function's owner, in the transaction that changes it.
    pub(super) fn check_code<E: From<StoreError> + From<QuotaError>>(
        &self,
        change: &Change,
        tenant: Option<&str>,
    ) -> Result<(), E> {
        let Some(quota) = self.of(tenant).code else { return Ok(()) };
        let used = usage(change, tenant)?.code;
        if used <= quota {
            return Ok(());
        }
        Err(QuotaError::Code { tenant: tenant.map(ToOwned::to_owned), used, quota }.into())
    }

    /// Checks the layers of an owner, in the transaction that publishes one.
    pub(super) fn check_layers<E: From<StoreError> + From<QuotaError>>(
        &self,
        change: &Change,
        tenant: Option<&str>,
    ) -> Result<(), E> {
        self.check_code::<E>(change, tenant)?;
        let Some(quota) = self.of(tenant).versions else { return Ok(()) };
        let used = usage(change, tenant)?.versions;
        if used <= quota {
            return Ok(());
        }
        Err(QuotaError::Versions { tenant: tenant.map(ToOwned::to_owned), used, quota }.into())
    }

    /// Checks the versions and snapshots of a function's owner, in the transaction that publishes
    /// one.
    pub(super) fn check_versions<E: From<StoreError> + From<QuotaError>>(
        &self,
        change: &Change,
        tenant: Option<&str>,
        new: &Version,
    ) -> Result<(), E> {
        let Quotas { versions, snapshots, .. } = self.of(tenant);
        let snapshots = snapshots.filter(|_| new.snap_start);
        if versions.is_none() && snapshots.is_none() {
            return Ok(());
        }
        let usage = usage(change, tenant)?;
        let tenant = tenant.map(ToOwned::to_owned);
        if let Some(quota) = versions.filter(|quota| usage.versions > *quota) {
            return Err(QuotaError::Versions { tenant, used: usage.versions, quota }.into());
        }
        if let Some(quota) = snapshots.filter(|quota| usage.snapshots > *quota) {
            return Err(QuotaError::Snapshots { tenant, used: usage.snapshots, quota }.into());
        }
        Ok(())
    }

    /// Checks the provisioned concurrency of a function's owner, and that of all functions against
    /// the limit of microVMs, in the transaction that changes it.
    pub(super) fn check_provisioned<E: From<StoreError> + From<ProvisionedError>>(
        &self,
        change: &Change,
        tenant: Option<&str>,
        monitors: usize,
    ) -> Result<(), E> {
        let (mut used, mut total) = (0, 0);
        for function in change.functions()? {
            let all = change.all_attachments(&function.latest.function)?.into_iter();
            let counts = all.filter_map(|(_, attachments)| Some(attachments.provisioned?.count));
            let of_function = counts.map(u64::from).sum::<u64>();
            total += of_function;
            if function.owner.as_deref() == tenant {
                used += of_function;
            }
        }
        if let Some(quota) = self.of(tenant).provisioned.filter(|quota| used > *quota) {
            let tenant = tenant.map(ToOwned::to_owned);
            return Err(
                ProvisionedError::from(QuotaError::Provisioned { tenant, used, quota }).into()
            );
        }
        let limit = u64::try_from(monitors).unwrap_or(u64::MAX);
        if total > limit {
            return Err(ProvisionedError::OverMonitors { total, limit }.into());
        }
        Ok(())
    }
}

impl FunctionRecord {
    /// Fails if the function belongs to another tenant than the one that asks: for that one it does
    /// not exist. Functions without an owner belong to all.
    pub(super) fn check_owner(&self, target: &Target) -> Result<(), NotFound> {
        match (&self.owner, target.tenant()) {
            (Some(owner), Some(tenant)) if owner != tenant => {
                Err(NotFound::Function(target.clone()))
            }
            _ => Ok(()),
        }
    }
}

fn usage(change: &Change, tenant: Option<&str>) -> Result<Usage, StoreError> {
    let mut usage = Usage::default();
    let mut codes = Vec::new();
    for function in change.functions()? {
        if function.owner.as_deref() != tenant {
            continue;
        }
        let versions = change.versions(&function.latest.function)?;
        for version in &versions {
            usage.versions += 1;
            usage.snapshots = usage.snapshots.saturating_add(snapshot_bytes(version));
        }
        let versions = versions.iter().chain([&function.latest]);
        codes.extend(versions.flat_map(Version::codes).cloned());
    }
    for (_, layer) in change.layers()? {
        if layer.owner.as_deref() == tenant {
            usage.versions += u64::try_from(layer.versions.len()).unwrap_or(u64::MAX);
            codes.extend(layer.versions.into_iter().map(|version| version.code));
        }
    }
    usage.code = bytes_of(codes);
    Ok(usage)
}

/// Size of zip files, each counted once, bytes.
pub(super) fn bytes_of(codes: impl IntoIterator<Item = Code>) -> u64 {
    let mut files = BTreeSet::new();
    let first = codes.into_iter().filter(|code| files.insert(code.sha256.clone()));
    first.map(|code| code.size).fold(0, u64::saturating_add)
}

/// What a version's snapshot takes, bytes: in a pool all of guest memory, in a directory what is
/// stored of it. Until it is frozen, the most that it can take.
fn snapshot_bytes(version: &Version) -> u64 {
    let guest = u64::from(guest_mib(version)) << 20;
    match (&version.snapshot, &version.state) {
        (Some(snapshot), _) => match snapshot.place {
            SnapshotPlace::Pool(_) => guest,
            SnapshotPlace::Directory(_) => snapshot.bytes,
        },
        (None, VersionState::Pending) => guest,
        (None, _) => 0,
    }
}

#[cfg(test)]
#[path = "tenants_tests.rs"]
mod tests;
