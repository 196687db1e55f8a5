//! The keys of the function's role, served as AWS's SDKs expect it of a container.
//!
//! Source: AWS SDKs and Tools Reference Guide, "Container credential provider".

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde_json::json;
use time::OffsetDateTime;
use time::macros::format_description;

use crate::protocol::RoleCredentials;

/// The path of the keys, as on AWS Lambda.
pub(super) const PATH: &str = "/2021-04-23/credentials";

/// The present keys.
#[derive(Debug, Clone, Default)]
pub(crate) struct Credentials(Arc<Mutex<Option<RoleCredentials>>>);

impl Credentials {
    /// Replaces the keys.
    pub(crate) fn set(&self, keys: Option<RoleCredentials>) {
        *self.0.lock() = keys;
    }

    /// The keys as a JSON document.
    pub(super) fn document(&self) -> Option<String> {
        let keys = self.0.lock();
        let keys = keys.as_ref()?;
        let end = OffsetDateTime::from(SystemTime::now() + Duration::from_secs(keys.lifetime_s));
        let form = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]Z");
        let document = json!({
            "AccessKeyId": keys.access_key_id,
            "SecretAccessKey": keys.secret_access_key,
            "Token": keys.session_token,
            "Expiration": end.format(form).ok()?,
        });
        Some(document.to_string())
    }
}
