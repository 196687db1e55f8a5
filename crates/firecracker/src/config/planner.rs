//! firn's own: the planner of a load.

use serde::{Deserialize, Serialize};

/// The planner of a load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlannerChoice {
    /// The planner, as `NAME[:KEY=VALUE,...]`.
    pub(crate) planner: String,
    /// Path of the socket of a pool's manager, for a planner that maps from a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pool: Option<String>,
}
