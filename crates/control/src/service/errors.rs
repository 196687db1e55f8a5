//! Errors of the service's operations.

use firn_run::EventError;

use super::attachments::MAX_PERMISSIONS;
use super::tags::MAX_TAGS;
use super::tenants::QuotaError;
use crate::blocking::TaskFailed;
use crate::functions::{CodeError, ConfigurationError, LATEST, RESTORE_HOOK_VARIABLE, Target};
use crate::store::StoreError;

/// A function, version or alias does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotFound {
    /// The function, or its version or alias that the request names.
    #[error("the function {0} does not exist")]
    Function(Target),
    /// The alias, which is the target's qualifier.
    #[error("the alias {0} does not exist")]
    Alias(Target),
}

/// The revision that the client expects is not the current revision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the revision is not the current revision")]
pub struct RevisionMismatch;

/// An object was not read.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// It does not exist.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The operation's task failed.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

/// A function was not created or changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// A function of this name exists.
    #[error("the function {0} already exists")]
    Exists(String),
    /// Another tenant has a layer of this name.
    #[error("the layer {0} already exists")]
    LayerExists(String),
    /// A tag is not valid.
    #[error(transparent)]
    Tag(#[from] InvalidTag),
    /// The function does not exist.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// Another request has changed the function.
    #[error(transparent)]
    Revision(#[from] RevisionMismatch),
    /// The configuration is not valid.
    #[error(transparent)]
    Configuration(#[from] ConfigurationError),
    /// The code is not valid, or was not stored.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// The function was changed, but not published.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// The function's owner would use too much.
    #[error(transparent)]
    Quota(#[from] QuotaError),
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The operation's task failed.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

/// A version was not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The function does not exist.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// Another request has changed the function.
    #[error(transparent)]
    Revision(#[from] RevisionMismatch),
    /// The code of `$LATEST` is not the code that the client expects.
    #[error("the digest of the code is {actual}, not {expected}")]
    Code {
        /// The client's SHA-256, in base64.
        expected: String,
        /// The SHA-256 of the code, in base64.
        actual: String,
    },
    /// The function has SnapStart and a runtime of its own, and declares no restore hook.
    #[error(
        "SnapStart of a provided runtime requires a restore hook, because all clones of a snapshot would draw the \
         same random values. Seed the runtime's generators after restore/next returns, and declare that with the \
         environment variable {RESTORE_HOOK_VARIABLE}=true"
    )]
    NoRestoreHook,
    /// The function's owner would use too much.
    #[error(transparent)]
    Quota(#[from] QuotaError),
    /// The function's owner may not choose its planner.
    #[error(transparent)]
    Configuration(#[from] ConfigurationError),
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The operation's task failed.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

/// A function or version was not deleted.
#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    /// It does not exist.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// `$LATEST` is deleted only together with the function.
    #[error("$LATEST cannot be deleted without the function")]
    Latest,
    /// The qualifier names an alias, not a version.
    #[error("the qualifier names an alias, not a version")]
    Alias,
    /// An alias names the version.
    #[error("the alias {alias} names the version {version}")]
    Aliased {
        /// The version.
        version: String,
        /// One of its aliases.
        alias: String,
    },
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The operation's task failed.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

/// An alias was not created or changed.
#[derive(Debug, thiserror::Error)]
pub enum AliasError {
    /// The function, version or alias does not exist.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// The name of a new alias is not valid.
    #[error("{0:?} cannot name an alias")]
    Name(String),
    /// The new alias exists.
    #[error("the alias {0} already exists")]
    Exists(Target),
    /// The weights of its versions are not valid.
    #[error("{0}")]
    Weights(&'static str),
    /// Its provisioned concurrency is not possible.
    #[error(transparent)]
    Provisioned(#[from] ProvisionedError),
    /// A new alias has to name a version.
    #[error("the alias names no version")]
    NoVersion,
    /// Another request has changed the alias.
    #[error(transparent)]
    Revision(#[from] RevisionMismatch),
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The operation's task failed.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

/// A request cannot be served in the function's current state, or is not valid.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The function or version does not exist.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// The version is being frozen.
    #[error("the version {0} is not ready")]
    Pending(Target),
    /// The version could not be frozen.
    #[error("the version could not be frozen: {reason}; publish another")]
    Failed {
        /// The error and its causes.
        reason: String,
    },
    /// The event is not UTF-8.
    #[error("the event is not UTF-8")]
    Utf8(#[from] std::str::Utf8Error),
    /// The event is too long or not JSON.
    #[error(transparent)]
    Event(#[from] EventError),
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The operation's task failed.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

impl From<FindError> for ChangeError {
    fn from(error: FindError) -> Self {
        match error {
            FindError::NotFound(error) => error.into(),
            FindError::Store(error) => error.into(),
            FindError::Task(error) => error.into(),
        }
    }
}

impl From<FindError> for PrepareError {
    fn from(error: FindError) -> Self {
        match error {
            FindError::NotFound(error) => error.into(),
            FindError::Store(error) => error.into(),
            FindError::Task(error) => error.into(),
        }
    }
}

/// An event is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum EventRefused {
    /// Too many events, or too many bytes of them, are queued or being served.
    #[error("too many events wait")]
    TooMany,
    /// The event cannot be stored.
    #[error("cannot store the event")]
    Store(#[source] std::io::Error),
    /// The operation's task failed.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

/// Tags are not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTag {
    /// There are more than AWS Lambda allows.
    #[error("a function has at most {MAX_TAGS} tags")]
    TooMany,
    /// A key is not valid.
    #[error(
        "the tag {0:?} is not valid: a key has 1 to 128 letters, digits, spaces and characters of _.:/=+-@, and does \
         not begin with aws:"
    )]
    Key(String),
    /// A value is not valid.
    #[error(
        "the value of the tag {0:?} is not valid: it has at most 256 letters, digits, spaces and characters of _.:/=+-@"
    )]
    Value(String),
}

/// Versions cannot have their provisioned concurrency.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProvisionedError {
    /// It is set for `$LATEST`, or an alias names that.
    #[error("provisioned concurrency is for published versions, and for aliases of them")]
    Unpublished,
    /// The alias names two versions.
    #[error("the alias {0} names two versions, and has provisioned concurrency")]
    Weights(String),
    /// The version has SnapStart.
    #[error("the version {0} has SnapStart, and cannot have provisioned concurrency as well")]
    SnapStart(String),
    /// The version has it already.
    #[error("the version {version} would have the provisioned concurrency of {} and of {}", by[0], by[1])]
    Twice {
        /// The version.
        version: String,
        /// The version, or aliases of it.
        by: [String; 2],
    },
    /// The function's limit of requests is lower.
    #[error("the provisioned concurrency is {total}, and the function's limit of requests {limit}")]
    OverReserved {
        /// Of all versions of the function.
        total: u32,
        /// The limit.
        limit: u32,
    },
    /// The daemon runs fewer microVMs.
    #[error(
        "the provisioned concurrency of all functions is {total}, and the limit of microVMs {limit} (--monitors)"
    )]
    OverMonitors {
        /// Of all functions.
        total: u64,
        /// The limit.
        limit: u64,
    },
    /// The function's owner would use too much.
    #[error(transparent)]
    Quota(#[from] QuotaError),
}

/// What is attached to a function, version or alias was not changed.
#[derive(Debug, thiserror::Error)]
pub enum AttachmentError {
    /// The function, version or alias does not exist.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// The version of a layer does not exist.
    #[error("the layer version does not exist")]
    NoLayer,
    /// It has no settings of this kind.
    #[error("{0} has none")]
    None(Target),
    /// A tag is not valid.
    #[error(transparent)]
    Tag(#[from] InvalidTag),
    /// It has a URL.
    #[error("{0} has a URL")]
    UrlExists(Target),
    /// A permission of this name exists.
    #[error("the statement {0} exists")]
    StatementExists(String),
    /// There is no permission of this name.
    #[error("there is no statement {0}")]
    NoStatement(String),
    /// The permissions are too long.
    #[error("the permissions are longer than {MAX_PERMISSIONS} bytes")]
    TooLong,
    /// Permissions of `$LATEST` are those of the function.
    #[error("permissions are for a function, a published version or an alias, not for {LATEST}")]
    Latest,
    /// Tags are only for functions.
    #[error("tags are for functions, not for their versions and aliases")]
    Qualified,
    /// Provisioned concurrency is not possible.
    #[error(transparent)]
    Provisioned(#[from] ProvisionedError),
    /// Another request has changed the permissions.
    #[error(transparent)]
    Revision(#[from] RevisionMismatch),
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The operation's task failed.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

impl From<FindError> for AttachmentError {
    fn from(error: FindError) -> Self {
        match error {
            FindError::NotFound(error) => error.into(),
            FindError::Store(error) => error.into(),
            FindError::Task(error) => error.into(),
        }
    }
}
